"""Llama 3.1 8B and 70B on TPU pods that are not here: memory per chip and messages, from their own compiler.

`python benchmarks/pods.py` asks for 12 programs on 64 to 512 chips, seconds each, and for three in three ways, and
writes pods.md beside itself. `--only 70B` takes the rows whose name has these words.
"""

import argparse
import contextlib
import datetime
import platform
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem
from llamem.llama import MeshShape
from llamem.mesh.mesh_step import batch_spec
from llamem.mesh.specs import parameter_specs, shardings

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


THREE_WAYS = (
    ("70B", "v5e:16x16", {"fsdp": 256}, 256, 1024),
    ("8B", "v6e:16x16", {"fsdp": 256}, 256, 2048),
    ("8B", "v5p:2x2x4", {"fsdp": 16}, 16, 2048),
)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
Way = Callable[..., tuple[Any, ...]]


def ours(config: llamem.LlamaConfig, settings: llamem.TrainSettings, mesh: dict[str, int]) -> tuple[Any, ...]:
    """The package's step, and its arguments."""
    return llamem.abstract_step(config, settings, llamem.Plan(mesh=mesh))


def by_gspmd(config: llamem.LlamaConfig, settings: llamem.TrainSettings, mesh: dict[str, int]) -> tuple[Any, ...]:
    """The step of one device with the plain loss, given to `jax.jit` with shardings of what goes in and comes out.

    Not with Splash, which XLA cannot partition.
    """
    plan, shape = llamem.Plan(attention="tiled", loss_tiles=None), MeshShape.of(mesh)
    step, state, batch = llamem.abstract_step(config, settings, plan)
    specs = parameter_specs(state, shape)

    def placed(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return jax.lax.with_sharding_constraint(state, shardings(specs, shape)), metrics

    def lying(shapes: Any, specs: Any) -> Any:
        return jax.tree.map(lambda leaf, where: leaf.update(sharding=where), shapes, shardings(specs, shape))

    return placed, lying(state, specs), lying(batch, (batch_spec(shape),) * 2)


def report(model: str, chip: str, mesh: dict[str, int], batch_size: int, seq_len: int, way: Way = ours) -> Any:
    """An AdamW step with everything in bfloat16, its state donated."""
    config = llamem.LlamaConfig.from_name(
        f"llama3.1-{model.lower()}", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16
    )
    step, state, batch = way(config, llamem.TrainSettings(batch_size=batch_size, seq_len=seq_len), mesh)
    return jaxmem.compile_report(step, state, batch, chip=chip, donate_argnums=(0,))


def line(model: str, chip: str, mesh: dict[str, int], batch_size: int, seq_len: int) -> str:
    """A row of the table."""
    seen = report(model, chip, mesh, batch_size, seq_len)
    how = " x ".join(f"{name} {size}" for name, size in mesh.items())
    fits = "fits" if seen.fits else "does not fit"
    peak = f"{seen.peak_bytes / 2**30:.2f} of {(seen.capacity_bytes or 0) / 2**30:.2f}"
    return f"| {model} | {chip} | {how} | {batch_size} x {seq_len:,} | {peak} | {fits} | {messages(seen, KINDS[:4])} |"


def messages(seen: Any, kinds: tuple[str, ...]) -> str:
    """The cells of messages by kind, of all that arrives, and of the compiler's seconds."""
    sent = {row.operation: f"{row.times} / {row.bytes / 2**30:.1f}" for row in seen.collectives}
    arriving = f"{sum(row.arriving for row in seen.collectives) / 2**30:.1f}" if sent else "not counted"
    return " | ".join((*(sent.get(kind, "") for kind in kinds), arriving, f"{seen.compile_seconds:.0f}"))


def in_three_ways(model: str, chip: str, mesh: dict[str, int], batch_size: int, seq_len: int) -> list[str]:
    """Rows of one program: as GSPMD partitions it, with gradients scattered in one stage, and side by side."""
    rows = []
    for name, way, sides in (("GSPMD", by_gspmd, True), ("in one stage", ours, False), ("side by side", ours, True)):
        nowhere = unittest.mock.patch("llamem.mesh.torus._places", lambda mesh: None)
        with contextlib.nullcontext() if sides else nowhere:
            seen = report(model, chip, mesh, batch_size, seq_len, way)
        peak = f"{seen.peak_bytes / 2**30:.3f}"
        rows.append(f"| {model} | {chip} | {batch_size} x {seq_len:,} | {name} | {peak} | {messages(seen, KINDS)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=())
    only = parser.parse_args().only
    versions = f"{compilers_used()}, {platform.machine()}"
    lines = [
        "# Llama 3.1 on pods, planned by the TPU compiler",
        "",
        f"{datetime.date.today()}, {versions}, by `benchmarks/pods.py`. GiB per chip of an AdamW step in bfloat16,",
        "of what a chip offers; messages as times / GiB of their results on one chip, in one step; the GiB that arrive",
        "there, where a sum that every chip gets whole counts twice; seconds of the compiler's process.",
        "",
        f"| model | chips | mesh | tokens | peak | | {' | '.join(KINDS[:4])} | arriving | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if set(only) <= {row[0], row[1]}:
            add(lines, [line(*row)], write=not only)
    header = " | ".join(("model", "chips", "tokens", "gradients", "peak", *KINDS, "arriving", "s"))
    about = (
        "GSPMD knows how arguments and results lie, and has the plain loss and tiled attention: it splits the stream "
        "along D, too."
    )
    titles = ["", "## The same step, its gradients summed in three ways", "", about]
    titles += ["", f"| {header} |", "|---" * 12 + "|"]
    add(lines, titles, write=not only)
    for row in THREE_WAYS:
        if set(only) <= {row[0], row[1]}:
            add(lines, in_three_ways(*row), write=not only)


def add(lines: list[str], new: list[str], write: bool) -> None:
    """Print new lines, and write the table with them."""
    print(*new, sep="\n", flush=True)
    lines += new
    if write:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
