"""The first advice of a report, followed: does it save what it said? Of other people's models, and of one scan.

`python benchmarks/advice.py` writes advice.md beside itself; words of models' names, and chips, take a part of it, and
the other lines stay.
`public_model_cases.py` says what has to be installed for its six. Nothing runs: peaks are the chips' compilers' word.
"""

import dataclasses
import datetime
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from compilers_used import compilers_used
from flax import nnx

import jaxmem
import llamem

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("v5e-1", "h100")
PUBLIC = ("mamba2", "gemma3", "qwen3", "vit", "dinov2", "canvit")
SHAPE = jax.ShapeDtypeStruct
OPTIMIZER = optax.adamw(1e-3)


def block(p: Any, x: Any) -> Any:
    """A block of 16 heads of 64 with scores written out, in float32."""
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    q, k, v = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, -1)
    q, k, v = (one.reshape(*x.shape[:2], 16, -1) for one in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]


def scan(followed: str = "") -> tuple[Any, ...]:
    """A step of 12 such layers, of no package: the one whose first advice is compiled."""
    remat = "nothing" if "keeps what" in followed else None
    sizes = {"qkv": (1024, 3072), "out": (1024, 1024), "up": (1024, 4096), "down": (4096, 1024)}
    blocks = {name: SHAPE((12, *size), jnp.float32) for name, size in sizes.items()}
    params = {"blocks": blocks, "embedding": SHAPE((8192, 1024), jnp.float32)}

    def loss(params: Any, ids: Any) -> Any:
        x = params["embedding"][ids[:, :-1]].astype(jnp.bfloat16)
        x = llamem.apply_stack(block, params["blocks"], x, remat=remat)
        return untiled(x, params["embedding"], ids[:, 1:])

    def step(params: Any, moments: Any, ids: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, ids)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step, params, jax.eval_shape(OPTIMIZER.init, params), SHAPE((8, 1025), jnp.int32)


def nanodo(followed: str = "") -> tuple[Any, ...]:
    """DeepMind's nanodo: its default configuration and its own `_train_step`, whose optimizer is a MultiSteps."""
    from flax import linen as nn
    from flax.training.train_state import TrainState
    from nanodo import data, loss, model_factory, optimizer, train  # pyrefly: ignore[missing-import]
    from nanodo.configs import default  # pyrefly: ignore[missing-import]

    config = default.get_config()
    config.log_internal_metrics, config.model.remat = False, "keeps what" in followed
    model, loss_factory = model_factory.get_model_and_loss(config, 32_101)

    def hidden(model: Any, ids: Any) -> Any:
        x = model.embed(ids) + model.pos_embed(jnp.arange(ids.shape[1])[None])
        for layer in model.blocks:
            x = layer(x)
        return model.out_ln(x).astype(jnp.float32)

    def tiled(batch: Any, apply: Any, config: Any) -> Any:
        def of(params: Any) -> Any:
            ids, targets, weights = data.get_in_out(batch)
            head = nn.meta.unbox(params["embed"]["embedding"])
            value = llamem.tiled_cross_entropy(
                apply({"params": params}, ids, method=hidden), head, targets, weights=weights
            )
            return value, loss.LossAuxData(ntokens=weights.sum(), state=(), log_perplexity=value)

        return of

    def init() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, 512), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer.get_optimizer(config.opt))

    factory = tiled if "logits" in followed else loss_factory
    step = functools.partial(train._train_step, c=config, get_loss_fn=factory)
    return step, jax.eval_shape(init), SHAPE((32, 512), jnp.int32)


def llada(followed: str = "") -> tuple[Any, ...]:
    """The LLaDA of jax-ml/bonsai, a quarter as wide and deep as the 8B; the package has inference alone, so that loss
    and step are what its paper says: every token is masked at a rate of its sequence's, and masked ones are learnt.
    """
    from bonsai.models.llada import modeling  # pyrefly: ignore[missing-import]

    block = importlib.reload(modeling).LLaDALlamaBlock
    if "keeps what" in followed:
        block.__call__ = nnx.remat(block.__call__)
    small = {"d_model": 2048, "n_heads": 16, "n_kv_heads": 16, "n_layers": 8, "mlp_hidden_size": 6144}
    small |= {"shd_cfg": modeling.ShardingConfig.no_sharding(), "return_hidden_states": "logits" in followed}
    config = dataclasses.replace(modeling.ModelConfig.llada_8b_it(False, False), **small)

    def loss(model: Any, ids: Any, keys: Any) -> Any:
        rates = jax.random.uniform(keys[0], (len(ids), 1), minval=0.1)
        masked = jax.random.uniform(keys[1], ids.shape) < rates
        given = jnp.where(masked, 126_336, ids)
        logits, _, states = model(given, jnp.ones_like(ids), keys[2])
        weights = masked / rates / ids.size
        if states:
            head = model.ff_out.kernel[...].T
            return llamem.tiled_cross_entropy(states[-1], head, ids, weights=weights, reduction="sum")
        each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), ids)
        return (weights * each).sum()

    @nnx.jit
    def step(model: Any, optimizer: Any, ids: Any, keys: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, ids, keys)
        optimizer.update(model, gradients)
        return value

    def init() -> Any:
        model = modeling.LLaDAModel(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    return step, *nnx.eval_shape(init), SHAPE((2, 2048), jnp.int32), keys


# Two from repositories that are on no package index: their folders are to be on PYTHONPATH.
OWN = {
    "a scan of 12 layers of 1,024 without remat, 8 x 1,024 tokens": scan,
    "nanodo at 10aefde, 32 x 512 tokens (linen, bf16)": nanodo,
    "bonsai's LLaDA at 3628425, 8 layers of 2,048, 2 x 2,048 tokens (nnx, bf16)": llada,
}


def untiled(hidden: Any, head_VD: Any, targets: Any) -> Any:
    logits = (hidden @ head_VD.astype(hidden.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def looped(
    layer: Any, layers: Any, x: Any, *inputs: Any, remat: Any = None, has_aux: bool = False, checkpointed: bool
) -> Any:
    outs = []
    for i in range(len(layers) or len(inputs[0])):
        one = layers[i] if layers else layers
        call = functools.partial(layer, one)  # closed over: equinox's modules hold more than arrays
        given = [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for rows in inputs]
        x = (jax.checkpoint(call) if checkpointed else call)(x, *given)
        if has_aux:
            x, out = x
            outs.append(out)
    return (x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)) if has_aux else x


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
    make = functools.partial(public, name) if name in PUBLIC else OWN[name]
    ask = functools.partial(jaxmem.compile_report, chip=chip)
    donated: tuple[int, ...] = (0, 1)
    # Bonsai's models are for use under a mesh alone.
    with jax.set_mesh(jax.make_mesh((1,), ("x",))) if "LLaDA" in name else nullcontext():
        report = ask(*make(), donate_argnums=donated)
        first = report.advice[0]
        with half_of_it(first.cause) if name in PUBLIC else nullcontext():
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
    chips = [chip for chip in CHIPS if chip in sys.argv] or CHIPS
    asked = [part for part in sys.argv[1:] if part not in CHIPS]
    names = [name for name in (*OWN, *PUBLIC) if not asked or any(part in re.findall(r"\w+", name) for part in asked)]
    for name in names:
        for chip in chips:
            line = row(name, chip)
            print(line, flush=True)
            write(line)


def write(line: str) -> None:
    head = ("model", "chip", "peak", "first advice", "it said", "it saved", "off", "the rest of the advice")
    kept = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {tuple(one.split(" | ")[:2]): one for one in (*kept, line) if one.startswith("| ")}
    rows.pop(("| model", "chip"), None)
    TABLE.write_text(
        "# Advice, followed\n\n"
        f"{datetime.date.today()}, {compilers_used()}, by `benchmarks/advice.py`: steps with AdamW, weights and\n"
        "moments donated, as their models' own pages write them, and the first remedy of `report.advice` followed and\n"
        "nothing else. GiB at the peak, by the chips' compilers; nothing ran on a chip.\n\n"
        + "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows.values()])
        + "\n"
    )


if __name__ == "__main__":
    main()
