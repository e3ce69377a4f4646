"""What fits where: the longest context of three models on five chips, trained whole, by adapters, over four bits.

`python benchmarks/lora_contexts.py` asks each chip's compiler, by `llamem.longest_context`, and writes the table beside
itself, a line as soon as it is there; `--draw` makes the picture of it, lora_contexts.png. Nothing lies on a host, so
that the plans hold on a free Colab, too. One sequence, at most the model's 131,072 tokens. Compilers are asked as far
as memory, which takes seconds; the plans of the largest model are compiled to the end.
"""

import argparse
import datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("t4", "v5e-1", "l4", "rtx4090", "a100-40")
MODELS = ("llama3.1-8b", "llama3.2-3b", "llama3.2-1b")
ADAPTERS = llamem.LoraConfig(ranks=(16,))
WAYS: dict[str, dict[str, Any]] = {
    "all parameters": {},
    "adapters": {"lora": ADAPTERS},
    "adapters over four bits": {"lora": ADAPTERS, "quantize": "q4_0"},
}
HEAD = f"""# What fits where: the longest context on one chip

{{today}}, {compilers_used("tpu", "cuda")}, by `benchmarks/lora_contexts.py`:
compiled for each chip, the plans of the 8B model to the end, not run. AdamW, one sequence, nothing on the host. All
parameters: weights, gradients and moments bf16. Adapters: of rank 16 on all seven projections, f32 with both moments,
over a base of 16 bits (f16 on a T4, else bf16), or with its layers in a GGUF's blocks of four bits (q4_0). Lengths are
multiples of 1,024, at most the models' 131,072, found by `llamem.longest_context` to about 3 %; 0 where not even 1,024
tokens fit. GiB.

| chip | model | trained | tokens | peak | of | plan |
|---|---|---|---|---|---|---|
"""


def row(chip: str, model: str, way: str) -> str:
    """One line of the table."""
    f16 = chip == "t4" and way != "all parameters"  # a T4 has no units for bf16
    dtype = jnp.float16 if f16 else jnp.bfloat16
    config = llamem.LlamaConfig.from_name(model, param_dtype=dtype, compute_dtype=dtype)
    start = f"| {chip} | {model} | {way} |"
    try:
        found = llamem.longest_context(config, chip, host_bytes=0, progress=None, **WAYS[way])
    except jaxmem.NothingFits:
        return f"{start} 0 | | {(jaxmem.CHIPS[chip].capacity_bytes or 0) / 2**30:.2f} | |"
    question, plan = found.estimate.question, found.plan
    report = question.compile(plan, depth="code" if model == "llama3.1-8b" else "memory")
    assert report.fits and not report.host_bytes, (start, report)
    size, room = report.peak_bytes / 2**30, (report.capacity_bytes or 0) / 2**30
    return f"{start} {found.seq_len:,} | {size:.2f} | {room:.2f} | `{plan}` |"


def rows() -> dict[tuple[str, ...], str]:
    """The lines of the table that is there, by chip, model and what is trained."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    cells = {line: [cell.strip() for cell in line.strip("|").split("|")] for line in lines}
    return {tuple(cell[:3]): line for line, cell in cells.items() if cell[0] in CHIPS and cell[2] in WAYS}


def draw() -> None:
    """Draw the table: a panel for each model, a group of bars for each chip of which all lines are there."""
    import matplotlib.pyplot as plt

    plt.style.use("petroff10")
    tokens = {key: int(line.split("|")[4].replace(",", "")) for key, line in rows().items()}
    chips = [chip for chip in CHIPS if all((chip, model, way) in tokens for model in MODELS for way in WAYS)]
    fig, panels = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    for ax, model in zip(panels, MODELS, strict=True):
        for i, (way, hatch) in enumerate(zip(WAYS, ("", "//", ".."), strict=True)):
            lengths = [tokens[chip, model, way] for chip in chips]
            places = [n + 0.27 * (i - 1) for n in range(len(chips))]
            ax.bar(places, [max(n, 700) for n in lengths], 0.25, label=way, hatch=hatch, edgecolor="white")
            for x, length in zip(places, lengths, strict=True):
                text = f"{length // 1024}k" if length else "none"
                ax.text(x, max(length, 700) * 1.15, text, ha="center", fontsize=7, rotation=90)
        ax.set_xticks(range(len(chips)), chips)
        ax.set_title(model.replace("llama", "Llama ").replace("-", " ").upper().replace("LLAMA", "Llama"))
        ax.set_yscale("log", base=2)
        ax.set_ylim(700, 300_000)
        ax.set_yticks([1024 * 2**n for n in range(8)], [f"{2**n}k" for n in range(8)])
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("longest context, tokens")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle("What fits on one chip, nothing on the host (compiled, not run)")
    fig.savefig(TABLE.with_suffix(".png"), dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--draw", action="store_true", help="only draw the table that is there")
    given = parser.parse_args()
    head = HEAD.format(today=datetime.date.today())
    order = [(chip, model, way) for chip in CHIPS for model in MODELS for way in WAYS]
    for key in [key for key in order if key[0] in given.chips and not given.draw]:
        if key not in rows():
            line = row(*key)
            print(line, flush=True)
            known = rows() | {key: line}
            TABLE.write_text(head + "".join(f"{known[one]}\n" for one in order if one in known))
    draw()


if __name__ == "__main__":
    main()
