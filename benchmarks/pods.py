"""Llama 3.1 8B and 70B on TPU pods that are not here: memory per chip and messages, from their own compiler.

`python benchmarks/pods.py` asks for 12 programs on 64 to 512 chips, seconds each, and writes pods.md beside itself.
`--only 70B` takes the rows whose name has these words.
"""

import argparse
import datetime
import platform
from pathlib import Path

import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem

TABLE = Path(__file__).with_suffix(".md")
# What, which chips, the mesh, how many sequences of how many tokens.
ROWS = (
    ("8B", "v5e:16x16", {"fsdp": 256}, 256, 8192),
    ("8B", "v5e:16x16", {"fsdp": 64, "tensor": 4}, 64, 8192),
    ("8B", "v5e:16x16", {"fsdp": 32, "context": 8}, 32, 131_072),
    ("8B", "v6e:16x16", {"fsdp": 256}, 256, 8192),
    ("70B", "v5p:4x4x4", {"fsdp": 64}, 64, 8192),
    ("70B", "v5p:4x4x4", {"fsdp": 16, "tensor": 4}, 16, 8192),
    ("70B", "v5p:8x8x8", {"fsdp": 512}, 512, 8192),
    ("70B", "v5p:8x8x8", {"fsdp": 64, "tensor": 8}, 64, 8192),
    ("70B", "v5p:8x8x8", {"fsdp": 32, "context": 16}, 32, 131_072),
    ("70B", "v5e:16x16", {"fsdp": 256}, 256, 4096),
    ("70B", "v6e:16x16", {"fsdp": 256}, 256, 8192),
    ("70B", "v6e:16x16", {"fsdp": 16, "context": 16}, 16, 131_072),
)


def report(model: str, chip: str, mesh: dict[str, int], batch_size: int, seq_len: int) -> jaxmem.Report:
    """An AdamW step with everything in bfloat16, its state donated."""
    config = llamem.LlamaConfig.from_name(
        f"llama3.1-{model.lower()}", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16
    )
    settings = llamem.TrainSettings(batch_size=batch_size, seq_len=seq_len)
    step, state, batch = llamem.abstract_step(config, settings, llamem.Plan(mesh=mesh))
    return jaxmem.compile_report(step, state, batch, chip=chip, donate_argnums=(0,))


def line(model: str, chip: str, mesh: dict[str, int], batch_size: int, seq_len: int) -> str:
    """A row of the table."""
    seen = report(model, chip, mesh, batch_size, seq_len)
    sent = {row.operation: f"{row.times} / {row.bytes / 2**30:.1f}" for row in seen.collectives}
    kinds = " | ".join(sent.get(kind, "") for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"))
    how = " x ".join(f"{name} {size}" for name, size in mesh.items())
    fits = "fits" if seen.fits else "does not fit"
    peak = f"{seen.peak_bytes / 2**30:.2f} of {(seen.capacity_bytes or 0) / 2**30:.2f}"
    tokens = f"{batch_size} x {seq_len:,}"
    return f"| {model} | {chip} | {how} | {tokens} | {peak} | {fits} | {kinds} | {seen.compile_seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=())
    only = parser.parse_args().only
    versions = f"{compilers_used()}, {platform.machine()}"
    lines = [
        "# Llama 3.1 on pods, planned by the TPU compiler",
        "",
        f"{datetime.date.today()}, {versions}, by `benchmarks/pods.py`. GiB per chip of an AdamW step in bfloat16,",
        "of what a chip offers; messages as times / GiB of their results on one chip, in one step; seconds of the",
        "compiler's process.",
        "",
        "| model | chips | mesh | tokens | peak | | all-gather | reduce-scatter | all-reduce | all-to-all | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if set(only) <= {row[0], row[1]}:
            print(found := line(*row), flush=True)
            lines.append(found)
            if not only:
                TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
