"""How far each tool for long contexts reaches, by the compilers of chips that need not be here.

    python benchmarks/long_contexts.py                       # both tables; writes long_contexts_{tools,longest}.md
    python benchmarks/long_contexts.py --part tools          # 1B at 131,072 tokens: each tool alone and together
    python benchmarks/long_contexts.py --part longest --chips v5e-1 --models llama3.2-1b

Every answer is the quick one, as soon as memory is assigned; `--depth code` makes the first table's programs to their
end. Answers are cached, so that what was cut off goes on where it stopped. Nothing runs on a chip.
"""

import argparse
import datetime
import itertools
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import llamem
from llamem.memory import GiB, Report

HERE = Path(__file__)
CHIPS = ("v5e-1", "v6e-1", "v5p-1", "a100-40", "a100-80", "h100")
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b")
STEP = 4096  # tokens between two contexts that are tried
MOST = 2**20
OFFLOAD = ("block_in",)
TOOLS: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload": OFFLOAD},
    "feed-forward in 32 tiles": {"mlp_tiles": 32},
    "attention in 8 tiles": {"attention_tiles": 8},
    "both tiles": {"mlp_tiles": 32, "attention_tiles": 8},
    "moments on the host": {"moments": "host"},
    "both tiles, offload": {"mlp_tiles": 32, "attention_tiles": 8, "offload": OFFLOAD},
    "both tiles, offload, moments on the host": {
        "mlp_tiles": 32,
        "attention_tiles": 8,
        "offload": OFFLOAD,
        "moments": "host",
    },
    "feed-forward in tiles, offload, moments on the host": {"mlp_tiles": 32, "offload": OFFLOAD, "moments": "host"},
    "both tiles, nested, moments on the host": {
        "mlp_tiles": 32,
        "attention_tiles": 8,
        "mode": "nested",
        "moments": "host",
    },
}


def compiled(model: str, chip: str, tokens: int, depth: Any = "memory", **options: Any) -> Report:
    """An AdamW step on one sequence, in bf16 unless `param_dtype` says otherwise, its state donated."""
    param_dtype = options.pop("param_dtype", jnp.bfloat16)
    config = llamem.LlamaConfig.from_name(model, param_dtype=param_dtype, compute_dtype=jnp.bfloat16)
    # Beyond the length that RoPE was set up for it is still the same program.
    config = config.replace(max_seq_len=max(tokens, config.max_seq_len))
    settings = llamem.TrainSettings(batch_size=1, seq_len=tokens)
    step, state, batch = llamem.abstract_step(config, settings, llamem.Plan(**options))
    return llamem.compile_report(step, state, batch, target=chip, donate=(0,), depth=depth)


def cell(model: str, chip: str, tokens: int, **options: Any) -> str:
    """The peak on the device and what lies on the host, in GiB, or what the compiler said instead."""
    try:
        report = compiled(model, chip, tokens, **options)
    except RuntimeError as error:
        print(f"{model} {chip} {tokens} {options}: {error}", flush=True)
        return "the compiler died"
    peak, host = (f"{size / GiB:.2f}" for size in (report.peak_bytes, report.host_bytes))
    print(f"{model} {chip} {tokens} {options}: {peak} + {host}, {report.compile_seconds:.0f} s", flush=True)
    return f"{peak} | {host}" if report.fits else f"**{peak}** | {host}"


def tools_table(tokens: int, chips: list[str], depth: str) -> None:
    """Each tool alone and together: what 1B needs for one long sequence."""
    chips = [chip for chip in ("v5p-1", "v5e-1") if chip in chips]
    lines = [
        f"# Llama 3.2 1B, {tokens:,} tokens, AdamW: what each tool buys",
        "",
        "GiB on the chip and on the host; bold where the chip has too little. Parameters, gradients and moments are",
        "bf16, and f32 in the rows that begin so; products are bf16.",
        "",
        f"| tools | {' | '.join(f'{chip} | host' for chip in chips)} |",
        f"|---|{'---|---|' * len(chips)}",
    ]
    in_f32 = {f"f32, {name}": options | {"param_dtype": jnp.float32} for name, options in TOOLS.items()}
    rows = TOOLS | {name: options for name, options in in_f32.items() if "offload" in name}
    for name, options in rows.items():
        cells = [cell("llama3.2-1b", chip, tokens, depth=depth, **options) for chip in chips]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        write("tools", lines)


def longest(model: str, chip: str, **options: Any) -> tuple[int, Report | None, str]:
    """The longest context, in multiples of `STEP`, that the chip's compiler lays out; its report, or why there is none.

    Memory grows nearly in a straight line, so that two answers foretell the rest. The next longer one was refused, or
    is `MOST`.
    """
    fit, refused = {}, {}
    tokens = 16 * STEP
    while True:
        try:
            report = compiled(model, chip, tokens, **options)
        except RuntimeError as error:
            print(f"{model} {chip} {tokens} {options}: {error}", flush=True)
            return max(fit, default=0), fit.get(max(fit, default=0)), f"the compiler died at {tokens:,}"
        (fit if report.fits else refused)[tokens] = report
        words = f"{report.peak_bytes / GiB:.2f} + {report.host_bytes / GiB:.2f}, {report.compile_seconds:.0f} s"
        print(f"{model} {chip} {tokens} {options}: {words}", flush=True)
        low, high = max(fit, default=0), min(refused, default=MOST + STEP)
        if high - low <= STEP:
            return low, fit.get(low), ""
        tokens = foretold({**fit, **refused}, report.capacity_bytes or 0)
        tokens = min(max(tokens // STEP * STEP, low + STEP), high - STEP)


def foretold(answers: dict[int, Report], capacity: int) -> int:
    """How many tokens a straight line through the two answers nearest to the capacity promises."""
    if len(answers) == 1:
        [(tokens, report)] = answers.items()
        return tokens * 2 if report.fits else tokens // 2
    (a, first), (b, second) = sorted(answers.items(), key=lambda item: abs(item[1].peak_bytes - capacity))[:2]
    slope = (second.peak_bytes - first.peak_bytes) / (b - a)
    return int(a + (capacity - first.peak_bytes) / slope) if slope > 0 else 2 * max(a, b)


def longest_table(models: list[str], chips: list[str]) -> None:
    """The longest context of each model on each chip, with every tool and with none."""
    lines = [
        "# The longest context of one sequence, AdamW of all parameters in bf16",
        "",
        f"In multiples of {STEP:,} tokens, up to {MOST:,}. All tools: attention in 8 tiles, feed-forward in 32,",
        "layer inputs on the host, moments on the chip or on the host, which then needs the GiB named. The models were",
        "made for 131,072 tokens; what is longer says only that it fits.",
        "",
        "| model | chip | no tools | all, moments on the chip | host GiB | all, moments on the host | host GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    plans = [{}, TOOLS["both tiles, offload"], TOOLS["both tiles, offload, moments on the host"]]
    for model, chip in itertools.product(models, chips):
        cells = []
        for plan in plans:
            tokens, report, died = longest(model, chip, **plan)
            host = f" | {report.host_bytes / GiB:.1f}" if report else " | "
            cells.append(f"{tokens:,}{f' ({died})' if died else ''}{host if plan else ''}")
        lines.append(f"| {model} | {chip} | {' | '.join(cells)} |")
        write("longest", lines)


def write(part: str, lines: list[str]) -> None:
    """The table as far as it is."""
    versions = f"jax {jax.__version__}, libtpu {metadata.version('libtpu')}"
    last = f"{datetime.date.today()}, {versions}, by `benchmarks/long_contexts.py`: compiled, and run on no chip."
    HERE.with_name(f"{HERE.stem}_{part}.md").write_text("\n".join([*lines, "", last]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("tools", "longest", "both"), default="both")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--depth", choices=("memory", "code"), default="memory")
    chosen = parser.parse_args()
    if chosen.part != "longest":
        tools_table(chosen.tokens, chosen.chips, chosen.depth)
    if chosen.part != "tools":
        longest_table(chosen.models, chosen.chips)


if __name__ == "__main__":
    main()
