"""The longest context of each model on each chip, by the compilers of chips that need not be here.

`python benchmarks/long_contexts.py` asks for every model, chip and type of weights, and writes long_contexts.md beside
itself, a line as soon as it is there; some minutes each on an idle machine. `--models llama3.2-1b --chips v5e-1` takes
a part. Lines that the table holds already stay, if the same compilers said them; `--again` asks anew. Answers are the
quick ones, as soon as memory is assigned, and nothing runs on a chip.
"""

import argparse
import datetime
import itertools
from pathlib import Path

import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem
from jaxmem import GiB, Report

TABLE = Path(__file__).with_suffix(".md")
WEIGHTS = {"bf16": jnp.bfloat16, "f32": jnp.float32}  # of weights, gradients and both moments
MODELS = ("llama3.2-1b", "llama3.1-8b", "llama3.2-3b")
CHIPS = ("v5e-1", "v6e-1", "v5p-1", "a100-40", "a100-80", "h100")
STEP, MOST = 1024, 2**20  # tokens
Row = tuple[str, str, str]  # weights, model, chip
ROWS: tuple[Row, ...] = tuple(itertools.product(WEIGHTS, MODELS, CHIPS))


def config_of(weights: str, model: str) -> llamem.LlamaConfig:
    """A model, products in bf16. Beyond the length that RoPE was set up for it is still the same program."""
    config = llamem.LlamaConfig.from_name(model, param_dtype=WEIGHTS[weights], compute_dtype=jnp.bfloat16)
    return config.replace(max_seq_len=MOST)


def with_defaults(config: llamem.LlamaConfig, chip: str) -> str:
    """The longest context of `Plan()`, within 3 %: the estimate says where to ask, each answer corrects it."""
    plan, correction = llamem.Plan(), 1.0
    fits, refused = 0, MOST // STEP + 1  # in steps
    answer: Report | None = None

    def expected(count: int) -> float:
        return correction * llamem.estimate(config, plan, chip, seq_len=count * STEP).peak_bytes

    capacity = jaxmem.CHIPS[chip].capacity_bytes or 0
    while refused - fits > max(1, fits // 32):
        guess = max((n for n in range(fits + 1, refused) if expected(n) <= capacity), default=fits + 1)
        report = llamem.estimate(config, plan, chip, seq_len=guess * STEP).compile()
        print(f"  {chip}, defaults, {guess * STEP:,} tokens: {report.peak_bytes / GiB:.2f} GiB", flush=True)
        correction *= report.peak_bytes / expected(guess)
        if report.fits:
            fits, answer = guess, report
        else:
            refused = guess
    return f"{fits * STEP:,} | {answer.peak_bytes / GiB:.2f}" if answer else f"below {STEP:,} | "


def with_tools(config: llamem.LlamaConfig, chip: str) -> str:
    """The longest context that the planner finds a plan for."""
    try:
        found = llamem.longest_context(config, chip, progress=lambda text: print(f"  {text}", flush=True))
    except jaxmem.NothingFits:
        return f"below {STEP:,} | | | | "
    assert found.report is not None
    peak, host = found.report.peak_bytes / GiB, found.report.host_bytes / GiB
    return f"{found.seq_len:,} | {peak:.2f} | {host:.1f} | {found.estimate.seconds.total:,.0f} | `{found.plan}`"


def earlier_rows() -> dict[Row, str]:
    """The lines of the table that is there; none of another compiler's."""
    text = TABLE.read_text() if TABLE.exists() else ""
    rows = {}
    for line in text.splitlines() if compilers_used() in text else []:
        weights, model, chip = [cell.strip() for cell in line.split("|")[1:4]] if line.startswith("| ") else [""] * 3
        if (weights, model, chip) in ROWS:
            rows[weights, model, chip] = line
    return rows


def page(rows: dict[Row, str]) -> str:
    return "\n".join(
        [
            "# The longest context of one sequence on one chip",
            "",
            f"{datetime.date.today()}, {compilers_used()}, "
            f"by `benchmarks/long_contexts.py`: compiled, and run on no chip.",
            f"{len(rows)} of {len(ROWS)} lines. AdamW of all parameters, one sequence, products in bf16. The first",
            "column is the type of weights, gradients and both moments: f32 is f32 master weights and f32 moments.",
            "",
            "Left, `Plan()`, to within 3 %. Right, what `longest_context` finds a plan for: by estimate to within",
            f"1.5 %, then accepted by the compiler; at most {MOST:,} tokens. The models were made for 131,072: what is",
            "longer says only that it fits. Weights stay on the chip: larger_than_the_chip.md has those that do not.",
            "Seconds of a step are a roofline's estimate. GiB on the chip, and in the host's memory.",
            "",
            "| weights | model | chip | defaults: tokens | GiB | tools: tokens | GiB | host GiB | s, est. | plan |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(rows[row] for row in ROWS if row in rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=tuple(WEIGHTS), choices=tuple(WEIGHTS))
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--again", action="store_true")
    chosen = parser.parse_args()
    for row in itertools.product(chosen.weights, chosen.models, chosen.chips):
        if row in earlier_rows() and not chosen.again:
            continue
        weights, model, chip = row
        config = config_of(weights, model)
        line = f"| {' | '.join(row)} | {with_defaults(config, chip)} | {with_tools(config, chip)} |"
        print(line, flush=True)
        TABLE.write_text(page(earlier_rows() | {row: line}))  # another run may have added lines meanwhile


if __name__ == "__main__":
    main()
