"""Draws the README's picture from the TPU compiler: `python benchmarks/headline.py`, into notebooks/headline.png."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import llamem
from llamem import plots

VARIANTS: dict[str, dict[str, Any]] = {
    "scan alone": {"remat": None, "num_tiles": None},
    "scan + vocabulary tiling": {"remat": None},
    "scan + remat": {"num_tiles": None},
    "scan + remat + tiling": {},
}


def main() -> None:
    config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    reports = {}
    for name, changes in VARIANTS.items():
        settings = llamem.TrainSettings(batch_size=1, seq_len=8192, **changes)
        step, state, batch = llamem.abstract_step(config, settings)
        reports[name] = llamem.compile_report(step, state, batch, donate=(0,), target="v5e-1")
        print(f"{name:26}{reports[name].peak_bytes / 2**30:6.1f} GiB")
    figure = plots.report_bars(reports)
    figure.axes[0].set_title("One training step of Llama 3.2 1B, 8,192 tokens, on one 16 GB TPU v5e")
    figure.savefig(Path(__file__).parent.parent / "notebooks" / "headline.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
