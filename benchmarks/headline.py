"""Draws the README's picture from the TPU compiler: `python benchmarks/headline.py`, into notebooks/headline.png."""

from pathlib import Path

import jax.numpy as jnp

import llamem
from llamem.course import plots

PLANS = {
    "neither": llamem.Plan(remat=None, loss_tiles=None),
    "vocabulary tiling": llamem.Plan(remat=None),
    "remat": llamem.Plan(loss_tiles=None),
    "both": llamem.Plan(),
}


def main() -> None:
    config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    reports = {}
    settings = llamem.TrainSettings(batch_size=1, seq_len=8192)
    for name, plan in PLANS.items():
        step, state, batch = llamem.abstract_step(config, settings, plan)
        reports[name] = llamem.compile_report(step, state, batch, donate_argnums=(0,), chip="v5e-1")
        print(f"{name:26}{reports[name].peak_bytes / 2**30:6.1f} GiB")
    figure = plots.timeline(reports)
    figure.suptitle("One training step of Llama 3.2 1B, 8,192 tokens, on one 16 GB TPU v5e", fontweight="bold")
    figure.savefig(Path(__file__).parent.parent / "notebooks" / "headline.png", bbox_inches="tight")
    print(plots.timeline_alt(reports))


if __name__ == "__main__":
    main()
