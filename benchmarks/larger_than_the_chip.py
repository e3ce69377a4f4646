"""Models larger than the chip: what a step needs with weights and moments on the host, by chips' compilers.

    python benchmarks/larger_than_the_chip.py                    # writes larger_than_the_chip.md
    python benchmarks/larger_than_the_chip.py --depth memory     # no row further than buffer assignment: quick

Rows marked "code" are compiled to their end. Nothing runs on a chip, so seconds are a roofline's estimate. Answers are
cached, so that what was cut off goes on where it stopped.
"""

import argparse
import dataclasses
import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import llamem
from llamem import Plan
from llamem.memory import GiB, Report

HERE = Path(__file__)
STREAMED = Plan(
    weights="host",
    moments="host",
    update="in_backward",
    offload=("block_in",),
    attention_tiles=8,
    mlp_tiles=32,
)
RESIDENT = STREAMED.replace(weights="device")


@dataclasses.dataclass(frozen=True)
class Row:
    """One step: what, where, and how far it is compiled."""

    model: str
    dtype: Any
    tokens: int
    chip: str
    depth: Any = "memory"
    plan: Plan = STREAMED
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"clip": "layer"})
    note: str = ""


F32, BF16 = jnp.float32, jnp.bfloat16
STOCHASTIC = {"clip": "layer", "rounding": "stochastic"}
ROWS = (
    Row("llama3.1-8b", F32, 131_072, "v5e-1", "code"),
    Row("llama3.1-8b", F32, 131_072, "v6e-1", "code"),
    Row("llama3.1-8b", F32, 8_192, "v5e-1", "code"),
    Row("llama3.1-8b", BF16, 131_072, "v5e-1", settings=STOCHASTIC, note="rounded stochastically"),
    Row("llama3.1-8b", F32, 131_072, "v5e-1", settings={}, note="clipped by the norm of all: two backward passes"),
    Row(
        "llama3.1-8b",
        F32,
        131_072,
        "v5e-1",
        plan=STREAMED.replace(update="after"),
        settings={},
        note="update after the backward pass, gradients on the host",
    ),
    Row("llama3.2-1b", F32, 131_072, "v5e-1", plan=RESIDENT, note="weights on the chip"),
    Row("llama3.2-1b", F32, 262_144, "v5e-1", note="beyond the 131,072 that RoPE was set up for"),
    Row("llama3.2-1b", BF16, 1_048_576, "v6e-1", settings=STOCHASTIC, note="beyond the 131,072 of RoPE"),
    Row("llama3.1-8b", F32, 8_192, "l4"),
    Row("llama3.1-8b", F32, 8_192, "a100-40"),
)


def step_of(row: Row) -> tuple[Any, ...]:
    """The step, its arguments, and the model."""
    config = llamem.LlamaConfig.from_name(row.model, param_dtype=row.dtype, compute_dtype=BF16)
    config = config.replace(max_seq_len=max(row.tokens, config.max_seq_len))
    settings = llamem.TrainSettings(batch_size=1, seq_len=row.tokens, **row.settings)
    return config, *llamem.abstract_step(config, settings, row.plan)


def cells(row: Row, most: str) -> list[str]:
    """One line of the table."""
    config, step, state, batch = step_of(row)
    depth = row.depth if most == "code" else "memory"
    sizes = {"seq_len": row.tokens, "clip": row.settings.get("clip", "global")}
    guess = llamem.estimate(config, row.plan, row.chip, **sizes)
    try:
        report: Report | None = llamem.compile_report(step, state, batch, target=row.chip, donate=(0,), depth=depth)
    except RuntimeError as error:
        print(f"{row}: {error}", flush=True)
        report = None
    said = "the compiler died"
    if report is not None:
        said = f"{report.peak_bytes / GiB:.2f}" if report.fits else f"**{report.peak_bytes / GiB:.2f}**"
        print(f"{row.model} {row.chip} {row.tokens}: {said}, {report.compile_seconds:.0f} s", flush=True)
    host = "" if report is None else f"{report.host_bytes / GiB:.1f}"
    kind = f"{row.model}, {jnp.dtype(row.dtype).name}" + (f"; {row.note}" if row.note else "")
    shown = [kind, row.chip, f"{row.tokens:,}", said, f"{guess.peak_bytes / GiB:.2f}", host]
    return [*shown, f"{guess.link_bytes / GiB:.0f}", f"{guess.seconds.total:,.0f}", depth]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", choices=("memory", "code"), default="code")
    chosen = parser.parse_args()
    lines = [
        "# Training what is larger than the chip",
        "",
        "One AdamW step of every parameter, one sequence; weights and moments in the type named, products in bf16.",
        "Weights, moments and layer inputs are on the host, layers are updated in the backward pass and clipped one by",
        "one, unless a row says otherwise. Bold: the chip has too little. GiB of the link: both ways, one step.",
        "Seconds are a roofline's estimate, with assumed efficiencies: nothing was run.",
        "",
        "| what | chip | tokens | GiB | estimated | host GiB | link GiB | s a step, est. | compiled to |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    versions = f"jax {jax.__version__}, libtpu {metadata.version('libtpu')}"
    last = f"{datetime.date.today()}, {versions}, by `benchmarks/{HERE.name}`: compiled, and run on no chip."
    for row in ROWS:
        if llamem.available(row.chip):
            lines.append(f"| {' | '.join(cells(row, chosen.depth))} |")
            HERE.with_suffix(".md").write_text("\n".join([*lines, "", last]) + "\n")


if __name__ == "__main__":
    main()
