"""The sizes of notebook 07's run that are worth a device."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxmem.chips.chip import Chip
from llamem import LlamaConfig, TrainSettings


def run_for(chip: Chip, preset: str, wished: Mapping[str, Any]) -> tuple[LlamaConfig, TrainSettings]:
    """Return a model and the settings of a run that are worth a device; what is wished, and not None, comes first.

    The preset "auto" is chosen too. A CPU's run takes a minute or two. The larger ones were chosen from compilers'
    reports, and have not been run. It computes in float32 where that is not slower than bfloat16.
    """
    if chip.platform == "cpu":
        suited, sizes = "tiny", dict[str, Any](steps=120, batch_size=1, seq_len=128, learning_rate=6e-3)
    elif (chip.capacity_bytes or 0) < 60 * 2**30:
        suited, sizes = "small", dict[str, Any](steps=1000, batch_size=16, seq_len=1024, learning_rate=1e-3)
    else:
        suited, sizes = "llama3.2-1b", dict[str, Any](steps=1000, batch_size=16, seq_len=2048, learning_rate=3e-4)
    sizes |= {name: value for name, value in wished.items() if value is not None}
    settings = TrainSettings(
        **sizes,
        warmup_steps=min(5, sizes["steps"] - 1),
        eval_every=max(1, sizes["steps"] // 3),
        eval_batches=max(1, 2048 // (sizes["batch_size"] * sizes["seq_len"])),
        snapshot_every=max(1, sizes["steps"] - 5),
    )
    in_f32 = chip.platform == "cpu" or "T4" in chip.device_kind
    dtype = jnp.float32 if in_f32 else jnp.bfloat16
    return LlamaConfig.from_name(suited if preset == "auto" else preset, compute_dtype=dtype), settings
