"""Compares the quick answer of an absent TPU's compiler with the whole one: peaks, and seconds of both.

`python benchmarks/quick_answers.py` compiles 20 programs for four chips, which takes hours on two cores, and writes
quick_answers.md beside itself. `--chips v5e-1 --programs "loss, plain" ...` takes a part; what the table holds of
others stays, if the same compiler said it. Exits with 1 where peaks differ by over 1 %.
"""

import argparse
import datetime
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compilers_used import compilers_used

import jaxmem
import llamem
from jaxmem import Chip

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("v5e-1", "v6e-1", "v5p-1", "v5e-8")
BF16 = jnp.bfloat16
OFFLOAD = llamem.Policy(offload=("block_in",))
Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, shapes, what is donated


def array(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def step(model: str, seq_len: int, **plan: Any) -> Callable[[Chip], Program]:
    """An AdamW step on one sequence a chip, its state donated, and with several chips shared out by FSDP."""

    def on(chip: Chip) -> Program:
        config = llamem.LlamaConfig.from_name(model, param_dtype=BF16, compute_dtype=BF16)
        settings = llamem.TrainSettings(batch_size=chip.devices, seq_len=seq_len)
        mesh = {"fsdp": chip.devices} if chip.devices > 1 else {}
        fn, state, batch = llamem.abstract_step(config, settings, llamem.Plan(mesh=mesh, **plan))
        return fn, (state, batch), (0,)

    return on


def spread(
    fn: Callable[..., Any], shapes: tuple[Any, ...], donate_argnums: tuple[int, ...] = ()
) -> Callable[[Chip], Program]:
    """A program whose arrays lie by their first axis over the chips, where that divides; else whole on every chip."""

    def on(chip: Chip) -> Program:
        if chip.devices == 1:
            return fn, shapes, donate_argnums
        mesh = chip.mesh(data=chip.devices)

        def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            divides = shape.ndim and shape.shape[0] % chip.devices == 0
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data" if divides else None))
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return fn, jax.tree.map(placed, shapes), donate_argnums

    return on


def loss(**options: Any) -> Callable[[Chip], Program]:
    """Cross-entropy of 8,192 tokens and a vocabulary of 128,256, with both gradients."""

    def whole(x, head, chips):
        logp = jax.nn.log_softmax((x @ head.T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logp, chips[:, None], 1))

    fn = functools.partial(llamem.tiled_cross_entropy, **options) if options else whole
    shapes = array(8192, 1024), array(128_256, 1024), array(8192, dtype=jnp.int32)
    return spread(jax.value_and_grad(fn, argnums=(0, 1)), shapes)


def stack(**options: Any) -> Callable[[Chip], Program]:
    """Eight residual layers of two products on 16,384 tokens, and all gradients."""

    def layer(w, x):
        return x + jnp.tanh(x @ w["in"]) @ w["out"]

    def total(w, x):
        return jnp.sum(llamem.apply_stack(layer, w, x, **options).astype(jnp.float32) ** 2)

    w = {"in": array(8, 1024, 4096), "out": array(8, 4096, 1024)}
    return spread(jax.value_and_grad(total, argnums=(0, 1)), (w, array(16_384, 1024)))


PROGRAMS: dict[str, Callable[[Chip], Program]] = {
    "loss, plain": loss(),
    "loss, 8 tiles of tokens": loss(num_tiles=8),
    "loss, 8 tiles of the vocabulary": loss(num_tiles=8, axis="vocab"),
    "stack, keep all": stack(),
    "stack, keep nothing": stack(remat="nothing"),
    "stack, nested": stack(mode="nested", remat="nothing"),
    "stack, unrolled": stack(mode="unroll"),
    "stack, unrolled, keep nothing": stack(mode="unroll", remat="nothing"),
    "donated sum": spread(lambda a, b: a + b, (array(16_384, 32_768), array(32_768)), (0,)),
    "sorted rows": spread(lambda a: jnp.sort(a, axis=-1)[:, :8], (array(4096, 16_384),)),
    "1B, 512 tokens, both": step("llama3.2-1b", 512),
    "1B, 2,048 tokens, both": step("llama3.2-1b", 2048),
    "1B, 8,192 tokens, both": step("llama3.2-1b", 8192),
    "1B, 8,192 tokens, neither": step("llama3.2-1b", 8192, remat=None, loss_tiles=None),
    "1B, 8,192 tokens, remat alone": step("llama3.2-1b", 8192, loss_tiles=None),
    "1B, 8,192 tokens, offloaded": step("llama3.2-1b", 8192, remat=OFFLOAD),
    "1B, 32,768 tokens, both": step("llama3.2-1b", 32_768),
    "8B, 2,048 tokens, both": step("llama3.1-8b", 2048),
    "8B, 16,384 tokens, both": step("llama3.1-8b", 16_384),
    "8B, 16,384 tokens, offloaded": step("llama3.1-8b", 16_384, remat=OFFLOAD),
}


def compared(name: str, chip: str) -> tuple[str, float]:
    """A line of the table, and by how many percent the two peaks differ."""
    fn, shapes, donated = PROGRAMS[name](jaxmem.find_chip(chip))
    compiling = functools.partial(jaxmem.compile_report, fn, *shapes, chip=chip, donate_argnums=donated, cache=False)
    quick, whole = compiling(depth="memory"), compiling(depth="code")
    assert quick.fits == whole.fits and quick.refused == whole.refused, (name, chip)
    difference = 100 * (quick.peak_bytes / whole.peak_bytes - 1)
    peaks = f"{quick.peak_bytes / 2**30:.3f} | {whole.peak_bytes / 2**30:.3f} | {difference:+.3f}"
    seconds = f"{quick.compile_seconds:.0f} | {whole.compile_seconds:.0f}"
    return f"| {name} | {chip} | {peaks} | {seconds} | {'refused' if quick.refused else ''} |", difference


def versions() -> str:
    return f"{compilers_used()}, {platform.machine()}"


def earlier_rows() -> dict[tuple[str, str], str]:
    """The lines of the table that is there, by program and chip; none of another compiler's."""
    text = TABLE.read_text() if TABLE.exists() else ""
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:] if versions() in text else []
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {(name, chip): row for row, (_, name, chip, *_) in zip(rows, cells, strict=True)}


def page(rows: dict[tuple[str, str], str]) -> str:
    """The table, in the order of `CHIPS` and `PROGRAMS`."""
    pairs = [(name, chip) for chip in CHIPS for name in PROGRAMS]
    return "\n".join(
        [
            "# Quick and whole answers of the TPU compiler",
            "",
            f"{datetime.date.today()}, {versions()}, by `benchmarks/quick_answers.py`:",
            f"{len(rows)} of {len(pairs)} pairs. Peaks in GiB per chip; seconds from the start of the compiler's",
            "process. What the compiler refuses ends at the same place either way. Other work shared the cores, so",
            "that seconds are long and uneven.",
            "",
            "| program | chip | quick | whole | difference in % | seconds, quick | seconds, whole | |",
            "|---|---|---|---|---|---|---|---|",
            *(rows[pair] for pair in pairs if pair in rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=CHIPS)
    parser.add_argument("--programs", nargs="+", default=tuple(PROGRAMS), choices=tuple(PROGRAMS))
    chosen = parser.parse_args()
    rows, worst = earlier_rows(), 0.0
    for chip in chosen.chips:
        for name in chosen.programs:
            rows[name, chip], difference = compared(name, chip)
            print(rows[name, chip], flush=True)
            worst = max(worst, abs(difference))
            TABLE.write_text(page(rows))
    raise SystemExit(f"peaks differ by up to {worst:.2f} %" if worst > 1 else 0)


if __name__ == "__main__":
    main()
