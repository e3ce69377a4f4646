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
from llamem.adapters import init_lora_state, make_lora_step
from llamem.files import smollm2_file

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
    TABLE.write_text("\n".join([*lines, "", *over_blocks()]) + "\n")
    print(TABLE.read_text())


def over_blocks() -> list[str]:
    """A table of the real model's step over its numbers and over its file's blocks, dequantised in each step."""
    file = smollm2_file()
    models = {
        "numbers, f32": llamem.load_pretrained(file, dtype="float32"),
        "the file's blocks": llamem.load_pretrained(file, compute_dtype="float32"),
    }
    config = models["numbers, f32"].config
    settings = llamem.TrainSettings(batch_size=2, seq_len=TOKENS)
    step = jax.jit(make_lora_step(config, settings))
    adapters = llamem.Adapters.create(config, llamem.LoraConfig(ranks=(8,)), rngs=nnx.Rngs(1))
    state, tokens_BT = (
        init_lora_state(adapters, settings),
        jax.random.randint(jax.random.key(0), (2, TOKENS), 0, 49_152),
    )
    batch, seconds = (tokens_BT, tokens_BT, jnp.zeros(2, jnp.int32)), {name: [] for name in models}
    for _ in range(ROUNDS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            jax.block_until_ready(step(state, nnx.state(model), batch))
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    first = medians["numbers, f32"]
    lines = [
        f"SmolLM2-135M, one adapter of rank 8, 2 sequences of {TOKENS} tokens, computed in f32. What is over 1 is the",
        "time of making numbers of blocks, twice in a step: once forward, once more for the backward pass.",
        "",
        "| weights under the adapter | bytes of them | median, s | of that over numbers |",
        "|---|---|---|---|",
    ]
    for name, model in models.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        lines.append(f"| {name} | {size:,} | {medians[name]:.2f} | {medians[name] / first:.2f} |")
    return lines


if __name__ == "__main__":
    main()
