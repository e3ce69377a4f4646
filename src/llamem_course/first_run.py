"""Around the run of notebook 07: sizes that are worth the device, and tables that its loss is compared with."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.chips.chip import Chip
from llamem import LlamaConfig, TrainSettings
from llamem.train import Batches


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


def counting_losses(batches: Batches, steps: int, heldout: Batches, judges: int, vocab_size: int) -> dict[str, float]:
    """Return losses in nats per token, by what a table knows, on the first `judges` batches of `heldout`.

    "knowing nothing": every token has the same chance. "counting single tokens": a token's share of what the first
    `steps` of `batches` read, each epoch once, with a little added for tokens that never came. "counting pairs": its
    share of what came after the token before, mixed with its chance alone, which counts as some more readings. How
    much is added and mixed is chosen on the tokens that judge.
    """
    before, after = _tokens(batches, min(steps, max(1, batches.num_sequences // batches.batch_size)))
    judged, judged_next = _tokens(heldout, judges)
    count_V = np.bincount(after, minlength=vocab_size)
    chances = [(count_V + k) / np.sum(count_V + k) for k in (1, 0.3, 0.1, 0.03)]
    chance_V = min(chances, key=lambda p_V: _loss(p_V[judged_next]))
    pairs = Counter(zip(before.tolist(), after.tolist(), strict=True))
    seen = np.array([pairs[pair] for pair in zip(judged.tolist(), judged_next.tolist(), strict=True)])
    times = np.bincount(before, minlength=vocab_size)[judged]
    mixed = ((seen + k * chance_V[judged_next]) / (times + k) for k in (3, 10, 30, 100, 300))
    return {
        "knowing nothing": float(np.log(vocab_size)),
        "counting single tokens": _loss(chance_V[judged_next]),
        "counting pairs": min(map(_loss, mixed)),
    }


def _tokens(batches: Batches, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the targets of the first batches, each as one row."""
    found = [batches.batch_at(i) for i in range(count)]
    before, after = (np.concatenate([pair[side].ravel() for pair in found]) for side in (0, 1))
    return before, after


def _loss(p_N: np.ndarray) -> float:
    return float(-np.mean(np.log(p_N)))
