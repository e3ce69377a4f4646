"""The longest context for LoRA of Llama 3.1 8B on one chip; `python benchmarks/lora_contexts.py` draws the table.

Adapters of rank 16 on all seven projections, f32 with AdamW, over a base in bf16; one sequence. What fits is asked of
each chip's compiler, by bisection, without the chip. The second plan cuts attention and feed-forward into tiles, and
keeps the layers' inputs in the host's memory. The third has the base's matrices in blocks of four bits.
"""

import argparse
import datetime
import functools
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import llamem
from llamem.llama.quantized import Kind

TABLE = Path(__file__).parent / "lora_contexts.md"
CHIPS = ("v6e-1", "l4", "v5e-1", "t4")
LEAST, STEP, MOST = 256, 1024, 131_072  # tokens
TOOLS: dict[str, Any] = {"head_groups": 8, "mlp_tiles": 32, "offload": ("block_in",)}
PLANS: dict[str, tuple[llamem.Plan, Kind | None]] = {
    "default": (llamem.Plan(), None),
    "tiles, offload": (llamem.Plan(**TOOLS), None),
    "default, q4_0": (llamem.Plan(), "q4_0"),
}


def report_of(chip: str, plan: llamem.Plan, bits: Kind | None, seq_len: int, model: str, rank: int) -> llamem.Report:
    """What the compiler says of one step; a T4 has no units for bf16."""
    dtype = jnp.float16 if chip == "t4" else jnp.bfloat16
    config = llamem.LlamaConfig.from_name(model, param_dtype=dtype, compute_dtype=dtype)
    settings, lora = llamem.TrainSettings(batch_size=1, seq_len=seq_len), llamem.LoraConfig(ranks=(rank,))
    step, *shapes = llamem.abstract_lora_step(config, settings, plan, lora, quantize=bits)
    return llamem.compile_report(step, *shapes, donate_argnums=(0,), chip=chip)


def longest(ask, step: int = STEP, most: int = MOST) -> tuple[int, llamem.Report, llamem.Report | None]:
    """The longest sequence that fits, a multiple of `step`, 0 if not the shortest; its answer, and the next one's."""
    first = ask(LEAST)
    if not first.fits:
        return 0, first, None
    good, bad, answers = 0, most // step + 1, {0: first}
    guess = min(8, most // step)
    while bad - good > 1:
        answers[guess] = ask(guess * step)
        good, bad = (guess, bad) if answers[guess].fits else (good, guess)
        guess = min(2 * good, most // step) if bad > most // step and good else (good + bad) // 2
    return max(good * step, LEAST), answers[good], answers.get(bad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--plans", nargs="+", default=tuple(PLANS), choices=tuple(PLANS))
    parser.add_argument("--model", default="llama3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    chosen = parser.parse_args()
    libtpu = metadata.version("libtpu")
    lines = [
        f"# The longest context for LoRA of {chosen.model} on one chip",
        "",
        f"{datetime.date.today()}, jax {jax.__version__}, libtpu {libtpu}, {platform.machine()}, by",
        "`benchmarks/lora_contexts.py`: compiled for each chip, nothing ran on one. Base and products in 16 bits (t4:",
        "f16, else bf16); q4_0: the base's matrices in a GGUF's blocks of four bits; adapters",
        f"of rank {chosen.rank} on all seven projections, f32, with AdamW; one sequence, to the next {STEP:,} tokens,",
        f"{MOST:,} at most. GiB; the last column is what {STEP:,} tokens more would need.",
        "",
        f"Tiles, offload: {TOOLS}.",
        "",
        "| chip | plan | tokens | peak | of | on the host | next |",
        "|---|---|---|---|---|---|---|",
    ]
    for chip in chosen.chips:
        for name in chosen.plans:
            ask = functools.partial(report_of, chip, *PLANS[name], model=chosen.model, rank=chosen.rank)
            tokens, fits, refused = longest(lambda seq_len, ask=ask: ask(seq_len))
            peak, room = fits.peak_bytes / 2**30, (fits.capacity_bytes or 0) / 2**30
            told = f"{tokens:,}" if tokens else f"not even {LEAST}"
            more = f"{refused.peak_bytes / 2**30:.2f}" if refused else ""
            host = f"{fits.host_bytes / 2**30:.0f}" if fits.host_bytes else ""
            lines.append(f"| {chip} | {name} | {told} | {peak:.2f} | {room:.2f} | {host} | {more} |")
            print(lines[-1], flush=True)
            TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
