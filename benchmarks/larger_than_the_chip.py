"""Models larger than the chip: what a step needs with weights and moments on the host, by chips' compilers.

    python benchmarks/larger_than_the_chip.py                    # every row, into larger_than_the_chip.md
    python benchmarks/larger_than_the_chip.py --rows 7 8         # these, beside what the table has of others
    python benchmarks/larger_than_the_chip.py --depth memory     # no row further than buffer assignment: quick

Rows marked "code" are compiled to their end. Nothing runs on a chip, so seconds are a roofline's estimate. Answers are
cached, so that what was cut off goes on where it stopped.
"""

import argparse
import dataclasses
import datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem
from jaxmem import GiB, Report
from llamem import Plan

TABLE = Path(__file__).with_suffix(".md")
STREAMED = Plan(
    weights="host",
    moments="host",
    update="in_backward",
    offload=("block_in",),
    head_groups=8,
    mlp_tiles=32,
)
RESIDENT = STREAMED.replace(weights="device")
LORA = STREAMED.replace(moments="device", update="after")
Name = tuple[str, str, str]  # what, chip, tokens
Compiled = tuple[str, str, str]  # GiB on the chip, GiB on the host, how far it was compiled


@dataclasses.dataclass(frozen=True)
class Row:
    """One step: what, where, and how far it is compiled. `rank`: of adapters over frozen weights, if above 0."""

    model: str
    dtype: Any
    tokens: int
    chip: str
    depth: Any = "memory"
    plan: Plan = STREAMED
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"clip": "layer"})
    note: str = ""
    rank: int = 0

    @property
    def name(self) -> Name:
        """What, chip and tokens, as the table says them."""
        kind = f"{self.model}, {jnp.dtype(self.dtype).name}" + (f", LoRA {self.rank}" if self.rank else "")
        return kind + (f"; {self.note}" if self.note else ""), self.chip, f"{self.tokens:,}"


F32, BF16 = jnp.float32, jnp.bfloat16
IN_GROUPS = "nested: inputs of groups of layers are kept"
STOCHASTIC = {"clip": "layer", "rounding": "stochastic"}
ROWS = (
    Row("llama3.1-8b", F32, 131_072, "v5e-1", "code"),
    Row("llama3.1-8b", F32, 131_072, "v6e-1", "code"),
    Row("llama3.1-8b", F32, 8_192, "v5e-1", "code"),
    Row("llama3.1-8b", BF16, 131_072, "v5e-1", settings=STOCHASTIC, note="rounded stochastically"),
    Row("llama3.2-1b", F32, 131_072, "v5e-1", plan=RESIDENT, note="weights on the chip"),
    Row("llama3.2-1b", F32, 262_144, "v5e-1", note="beyond the 131,072 that RoPE was set up for"),
    Row("llama3.2-1b", BF16, 917_504, "v6e-1", settings=STOCHASTIC, note="beyond the 131,072 of RoPE"),
    Row("llama3.2-1b", BF16, 1_048_576, "v6e-1", settings=STOCHASTIC, note="beyond the 131,072 of RoPE"),
    Row("llama3.1-8b", BF16, 131_072, "v5e-1", "code", LORA, {}, "", 16),
    Row("llama3.1-8b", BF16, 131_072, "v5e-1", "code", LORA.replace(mode="nested"), {}, IN_GROUPS, 16),
    Row("llama3.1-8b", BF16, 131_072, "v6e-1", plan=LORA.replace(mode="nested"), settings={}, note=IN_GROUPS, rank=16),
    Row("llama3.1-8b", F32, 131_072, "v5e-1", plan=STREAMED.replace(mode="nested"), note=IN_GROUPS),
    Row("llama3.1-8b", F32, 8_192, "l4", "code"),
    Row("llama3.1-8b", F32, 8_192, "a100-40", "code"),
)


def config_of(row: Row) -> llamem.LlamaConfig:
    config = llamem.LlamaConfig.from_name(row.model, param_dtype=row.dtype, compute_dtype=BF16)
    return config.replace(max_seq_len=max(row.tokens, config.max_seq_len))


def lora_of(row: Row) -> llamem.LoraConfig | None:
    return llamem.LoraConfig(ranks=(row.rank,)) if row.rank else None


def step_of(row: Row) -> tuple[Any, ...]:
    """The step and its arguments, as shapes. Raises ValueError for a plan that the settings exclude."""
    settings = llamem.TrainSettings(batch_size=1, seq_len=row.tokens, **row.settings)
    if lora := lora_of(row):
        return llamem.abstract_lora_step(config_of(row), settings, row.plan, lora)
    return llamem.abstract_step(config_of(row), settings, row.plan)


def report_of(row: Row, depth: Any) -> Report:
    """What the compiler says. Raises RuntimeError, with the compiler's words, where it gives no answer."""
    step, *shapes = step_of(row)
    return jaxmem.compile_report(step, *shapes, chip=row.chip, donate_argnums=(0,), depth=depth)


def compiled(row: Row, depth: Any) -> Compiled:
    """The compiler's cells of a line; where it does not come to the end, how far it came and what it said."""
    try:
        report = report_of(row, depth)
    except RuntimeError as error:
        print(f"{row.name}: {error}", flush=True)
        peak, host, reached = compiled(row, "memory") if depth == "code" else ("no answer", "", depth)
        return peak, host, f"{reached}, then: {sentence(str(error))}"
    print(f"{row.name}: {report.compile_seconds:.0f} s", flush=True)
    peak = f"{report.peak_bytes / GiB:.2f}"
    host = "" if report.refused else f"{report.host_bytes / GiB:.1f}"  # a compiler that refuses does not say
    return peak if report.fits else f"**{peak}**", host, report.depth


def sentence(error: str) -> str:
    """The beginning and the end of what a compiler said, in its own words."""
    words = error.partition("refused the program: ")[2].strip() or error
    return words if len(words) < 160 else f"{words[:70]} ... {words[-80:]}"


def line(row: Row, said: Compiled) -> str:
    """One line of the table, its estimates made now."""
    sizes = {"seq_len": row.tokens, "clip": row.settings.get("clip", "global"), "lora": lora_of(row)}
    guess = llamem.estimate(config_of(row), row.plan, row.chip, **sizes)
    link, seconds = f"{guess.link_bytes / GiB:.0f}", f"{guess.seconds.total:,.0f}"
    peak, host, depth = said
    return f"| {' | '.join([*row.name, peak, f'{guess.peak_bytes / GiB:.2f}', host, link, seconds, depth])} |"


def earlier() -> dict[Name, Compiled]:
    """What compilers said in the table that is there, by what, chip and tokens; nothing of other versions of them."""
    text = TABLE.read_text() if TABLE.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:] if compilers_used() in text else []
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {(what, chip, tokens): (peak, host, depth) for what, chip, tokens, peak, _, host, *_, depth in cells}


def page(said: dict[Name, Compiled]) -> str:
    """The table, in the order of `ROWS`."""
    return "\n".join(
        [
            "# Training what is larger than the chip",
            "",
            "One AdamW step of every parameter, one sequence; weights and moments in the type named, products in bf16.",
            "Weights, moments and layer inputs are on the host, layers are updated in the backward pass and clipped",
            "one by one, unless a row says otherwise. LoRA: adapters in f32 on all seven projections, with moments on",
            "the chip, the frozen weights on the host. Bold: the chip has too little. GiB of the link: both ways, one",
            "step. Seconds are a roofline's estimate, with assumed efficiencies: nothing was run.",
            "",
            "| what | chip | tokens | GiB | estimated | host GiB | link GiB | s a step, est. | compiled to |",
            "|---|---|---|---|---|---|---|---|---|",
            *(line(row, said[row.name]) for row in ROWS if row.name in said),
            "",
            f"{datetime.date.today()}, {compilers_used()}, "
            f"by `benchmarks/{TABLE.stem}.py`: compiled, and run on no chip.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbered = range(1, len(ROWS) + 1)
    parser.add_argument("--rows", nargs="+", type=int, default=numbered, choices=numbered, metavar="N")
    parser.add_argument("--depth", choices=("memory", "code"), default="code")
    chosen = parser.parse_args()
    for number in chosen.rows:
        row = ROWS[number - 1]
        if jaxmem.available(row.chip):
            new = compiled(row, row.depth if chosen.depth == "code" else "memory")
            TABLE.write_text(page(earlier() | {row.name: new}))


if __name__ == "__main__":
    main()
