"""The first advice of a report, followed: does it save what it said? Of other people's models, and of two like theirs.

`python benchmarks/advice.py` writes advice.md beside itself; names of models take a part, and the other lines stay.
`public_model_cases.py` says what has to be installed for its six. Nothing runs: peaks are the chips' compilers' word.
"""

import datetime
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from compilers_used import compilers_used

import jaxmem
import llamem

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("v5e-1", "h100")
PUBLIC = ("mamba2", "gemma3", "qwen3", "vit", "dinov2", "canvit")
SHAPE = jax.ShapeDtypeStruct
OPTIMIZER = optax.adamw(1e-3)


def normalised(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def block(p: Any, x: Any, *, heads: int, causal: bool) -> Any:
    """A block as nanodo and LLaDA have it: scores written out, in float32."""
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    q, k, v = jnp.split(normalised(x, p["first"]) @ p["qkv"], 3, -1)
    q, k, v = (one.reshape(*x.shape[:2], heads, -1) for one in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalised(x, p["second"]) @ p["up"]) @ p["down"]


def transformer(
    width: int, layers: int, words: int, tokens: tuple[int, int], *, causal: bool, several: bool, scanned: bool
) -> Callable[..., Any]:
    """Return the maker of a step: a list of layers and all logits, or what its keywords say."""

    def make(*, remat: bool = False, tiled: bool = False) -> tuple[Any, ...]:
        def init() -> Any:
            sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
            sizes |= {"down": (4 * width, width), "first": (width,), "second": (width,)}
            rows = [{name: jnp.ones(size) for name, size in sizes.items()} for _ in range(layers)]
            blocks = llamem.stack_layers(rows) if scanned else rows
            return {"embedding": jnp.ones((words, width)), "blocks": blocks, "last": jnp.ones(width)}

        layer = functools.partial(block, heads=width // 64, causal=causal)

        def loss(params: Any, ids: Any) -> Any:
            x = params["embedding"][ids[:, :-1]].astype(jnp.bfloat16)
            if scanned:
                x = llamem.apply_stack(layer, params["blocks"], x, remat="nothing" if remat else None)
            else:
                for one in params["blocks"]:
                    x = (jax.checkpoint(layer) if remat else layer)(one, x)
            x, head = normalised(x, params["last"]), params["embedding"].astype(jnp.bfloat16)
            if tiled:
                return llamem.tiled_cross_entropy(x, head, ids[:, 1:])
            logits = (x @ head.T).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        optimizer = optax.MultiSteps(OPTIMIZER, 4).gradient_transformation() if several else OPTIMIZER

        def step(params: Any, moments: Any, ids: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, ids)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, value

        params = jax.eval_shape(init)
        batch = SHAPE((tokens[0], tokens[1] + 1), jnp.int32)
        return step, params, jax.eval_shape(optimizer.init, params), batch

    return make


OWN = {
    "like nanodo: 6 layers of 512, 32 x 512 tokens, MultiSteps": transformer(
        512, 6, 32_101, (32, 512), causal=True, several=True, scanned=False
    ),
    "like LLaDA: 8 layers of 2,048, 126,464 words, 2 x 1,024 tokens": transformer(
        2048, 8, 126_464, (2, 1024), causal=False, several=False, scanned=False
    ),
    "a scan of 12 layers of 1,024 without remat, 8 x 1,024 tokens": transformer(
        1024, 12, 8192, (8, 1024), causal=True, several=False, scanned=True
    ),
}


def own(name: str, followed: str = "") -> tuple[Any, ...]:
    make = OWN[name]
    return make(tiled="logits" in followed, remat="keeps what" in followed)


def untiled(hidden: Any, head_VD: Any, targets: Any) -> Any:
    logits = (hidden @ head_VD.astype(hidden.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def looped(layer: Any, layers: Any, x: Any, *inputs: Any, remat: Any = None, checkpointed: bool) -> Any:
    for i, one in enumerate(layers):
        call = functools.partial(layer, one)  # closed over: equinox's modules hold more than arrays
        given = [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for rows in inputs]
        x = (jax.checkpoint(call) if checkpointed else call)(x, *given)
    return x


@contextmanager
def half_of_it(followed: str) -> Iterator[None]:
    """Within it, the lines of a public case do the one thing that was advised: checkpoint their layers, or tile."""
    kept = {name: getattr(llamem, name) for name in ("tiled_cross_entropy", "stack_layers", "apply_stack")}
    tiled = "logits" in followed
    other = {"stack_layers": lambda layers: layers, "apply_stack": functools.partial(looped, checkpointed=not tiled)}
    if not tiled:
        other["tiled_cross_entropy"] = untiled
    try:
        for name, value in other.items():
            setattr(llamem, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(llamem, name, value)


def public(name: str, followed: str = "") -> tuple[Any, ...]:
    from public_model_cases import CASES
    from public_models import make_step

    return make_step(CASES[name], CASES[name].batch, stacked=bool(followed))


def row(name: str, chip: str) -> str:
    """Return a line of the table: what the first advice said, and what following it saved."""
    make = functools.partial(public if name in PUBLIC else own, name)
    ask = functools.partial(jaxmem.compile_report, chip=chip)
    donated: tuple[int, ...] = (0, 1)
    report = ask(*make(), donate_argnums=donated)
    first = report.advice[0]
    with half_of_it(first.cause):
        after = ask(*make(first.cause), donate_argnums=donated)
    saved = report.peak_bytes - after.peak_bytes
    gib = [f"{size / 2**30:.2f}" for size in (report.peak_bytes, first.bytes, saved)]
    known = "compiled" if first.compiled else "estimated"
    rest = ", ".join(f"{one.bytes / 2**30:.2f} {one.cause}" for one in report.advice.remedies[1:])
    cells = (
        name,
        chip,
        gib[0],
        first.cause,
        f"{gib[1]} ({known})",
        gib[2],
        f"{first.bytes / saved - 1:+.0%}" if saved else "not followed",
        rest,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the table."""
    names = sys.argv[1:] or [*OWN, *PUBLIC]
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {tuple(line.split(" | ")[:2]): line for line in lines if line.startswith("| ")}
    for name in names:
        for chip in CHIPS:
            line = row(name, chip)
            print(line, flush=True)
            rows[tuple(line.split(" | ")[:2])] = line
            write(rows)


def write(rows: dict[tuple[str, ...], str]) -> None:
    head = ("model", "chip", "peak", "first advice", "it said", "it saved", "off", "the rest of the advice")
    title = tuple(f"| {' | '.join(head)} |".split(" | ")[:2])
    lines = [line for key, line in rows.items() if key != title and not line.startswith("| ---")]
    TABLE.write_text(
        "# Advice, followed\n\n"
        f"{datetime.date.today()}, {compilers_used()}, by `benchmarks/advice.py`: steps with AdamW, weights and\n"
        "moments donated, as their models' own pages write them, and the first remedy of `report.advice` followed and\n"
        "nothing else. GiB at the peak, by the chips' compilers; nothing ran on a chip.\n\n"
        + "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])
        + "\n"
    )


if __name__ == "__main__":
    main()
