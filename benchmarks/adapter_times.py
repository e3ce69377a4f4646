"""Seconds of a training step with one adapter and with many, on this machine; `python benchmarks/adapter_times.py`.

The same 64 sequences each time, shared out among the adapters; rank 8 on all seven projections. All steps run in one
process, one after the other in rounds, and the median round counts.
"""

import datetime
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import llamem
from llamem.train import init_lora_state, make_lora_step

TABLE = Path(__file__).parent / "adapter_times.md"
COUNTS, SEQUENCES, TOKENS, ROUNDS = (1, 8, 64), 64, 128, 7
CONFIG = llamem.LlamaConfig.from_name(
    "tiny", vocab_size=4096, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32, d_ff=768, max_seq_len=TOKENS
)


def main() -> None:
    settings = llamem.TrainSettings(batch_size=SEQUENCES, seq_len=TOKENS)
    base = nnx.state(llamem.Llama(CONFIG, rngs=nnx.Rngs(0)))
    step = jax.jit(make_lora_step(CONFIG, settings), donate_argnums=0)
    tokens_BT = jax.random.randint(jax.random.key(0), (SEQUENCES, TOKENS), 0, CONFIG.vocab_size)
    states, seconds = {}, {count: [] for count in COUNTS}
    for count in COUNTS:
        adapters = llamem.Adapters.create(CONFIG, llamem.LoraConfig(ranks=(8,) * count), rngs=nnx.Rngs(1))
        states[count] = init_lora_state(adapters, settings)
    for _ in range(ROUNDS + 1):
        for count in COUNTS:
            batch = tokens_BT, tokens_BT, jnp.arange(SEQUENCES) % count
            start = time.perf_counter()
            states[count], _ = jax.block_until_ready(step(states[count], base, batch))
            seconds[count].append(time.perf_counter() - start)
    medians = {count: statistics.median(times[1:]) for count, times in seconds.items()}  # the first one compiles
    lines = [
        f"# Seconds of a step with many adapters, on {jax.default_backend()}",
        "",
        f"{datetime.date.today()}, jax {jax.__version__}, {platform.machine()}, by `benchmarks/adapter_times.py`:",
        f"{SEQUENCES} sequences of {TOKENS} tokens, {CONFIG.n_params:,} frozen weights, rank 8 on all projections,",
        f"f32; the median of {ROUNDS} rounds, and the fastest.",
        "",
        "| adapters | their numbers | median, s | fastest, s | median, of one adapter's |",
        "|---|---|---|---|---|",
    ]
    for count in COUNTS:
        size = sum(leaf.size for leaf in jax.tree.leaves(states[count].params.weights))
        ratio = medians[count] / medians[COUNTS[0]]
        lines.append(f"| {count} | {size:,} | {medians[count]:.2f} | {min(seconds[count][1:]):.2f} | {ratio:.3f} |")
    TABLE.write_text("\n".join(lines) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
