"""What turns gradients into new weights: clipping, a rule of optax, rounding. Of all of a model or of a part."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float32, Int, PRNGKeyArray

from llamem.llama.sharding import MeshShape, parameter_name
from llamem.train.on_host import Update, in_blocks
from llamem.train.settings import TrainSettings
from llamem.train.sharded_step import global_norm

Norm = Callable[[Any], Array]


def make_optimizer(
    settings: TrainSettings, norm: Norm = global_norm, rule: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Clipping by a norm, then `rule`, by default AdamW under warm-up and cosine decay.

    AdamW's betas are 0.9 and 0.95, and norms do not decay. A warm-up of `steps` or more ends at the last step but one:
    the rate has its peak in the last. `norm` is the norm of the gradients that are clipped, from those at hand.
    """

    def clip(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if settings.clip == "layer":
            return clip_layers(settings, updates), state
        return updates if settings.clip_norm is None else _within(updates, norm(updates), settings.clip_norm), state

    # Not optax.clip_by_global_norm, which would take the norm of one device's part.
    clipping = optax.GradientTransformation(lambda params: optax.EmptyState(), clip)
    return optax.chain(clipping, rule or _adamw(settings))


def clipped_by(
    settings: TrainSettings, rule: optax.GradientTransformation | None, norm: Array | None
) -> optax.GradientTransformation:
    """`make_optimizer` for a part of all gradients, which are clipped by this norm; None: they are clipped already.

    Its state is that of the whole, or a part of it.
    """
    own = dataclasses.replace(settings, clip="global", clip_norm=None if norm is None else settings.clip_norm)
    return make_optimizer(own, lambda _: jnp.asarray(norm), rule)


def _adamw(settings: TrainSettings) -> optax.GradientTransformation:
    warmup = min(settings.warmup_steps, settings.steps - 1)
    peak = settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(peak / max(warmup, 1), peak, warmup, settings.steps, peak / 10)

    def decays(path: tuple, _: Any) -> bool:
        return "norm" not in jax.tree_util.keystr(path)

    def decayed(params: Any) -> Any:
        return jax.tree.map_with_path(decays, params)

    return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=decayed)


def clip_layers(settings: TrainSettings, grads: Any) -> Any:
    """Gradients with those of each layer within the norm that the settings say; what is in no layer, array by array."""
    max_norm = settings.clip_norm
    if max_norm is None:
        return grads
    squares_L: Any = sum(
        jnp.sum(jnp.square(_wide(grad)), axis=tuple(range(1, grad.ndim)))
        for path, grad in jax.tree.leaves_with_path(grads)
        if in_blocks(path)
    )

    def one(path: tuple[Any, ...], grad: Array) -> Array:
        if not in_blocks(path):
            return _within(grad, norm_of(grad), max_norm)
        return _within(grad, jnp.sqrt(squares_L).reshape(-1, *(1,) * (grad.ndim - 1)), max_norm)

    return jax.tree.map_with_path(one, grads)


def _within(grads: Any, norm: Array, max_norm: float) -> Any:
    return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm), grads)


def _wide(grad: Array) -> Array:
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


def squares(grads: Any) -> Array:
    """The sum of the squares of all gradients, in f32."""
    return sum((jnp.sum(jnp.square(_wide(grad))) for grad in jax.tree.leaves(grads)), start=jnp.zeros(()))


def norm_of(grads: Any) -> Array:
    """The norm of gradients on one device, whatever they are of."""
    return jnp.sqrt(squares(grads))


def make_update(settings: TrainSettings, optimizer: optax.GradientTransformation, step: Array) -> Update:
    """`update(grads, opt_state, params, first=0)`: new parameters, rounded as the settings say, and the new state.

    `first` is the number of the first row or layer that the arrays have of the whole ones. `step` is the number of
    updates before this one.
    """

    def update(grads: Any, opt_state: Any, params: Any, first: Any = 0) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        if settings.rounding == "nearest":
            return optax.apply_updates(params, updates), opt_state
        key = jax.random.fold_in(jax.random.key(settings.seed), step)

        def add(path: tuple[Any, ...], param: Array, change: Array) -> Array:
            own = jax.random.fold_in(key, zlib.crc32(str(parameter_name(path)).encode()))
            return stochastically_rounded(param.astype(jnp.float32) + change.astype(jnp.float32), own, first)

        return jax.tree.map_with_path(add, params, updates), opt_state

    return update


def stochastically_rounded(
    x: Float32[Array, "N *rest"], key: PRNGKeyArray, first: int | Int[Array, ""] = 0
) -> BFloat16[Array, "N *rest"]:
    """Each number as one of its two neighbours in bf16, the nearer one more often: on average the number itself.

    So weights without an f32 copy follow updates that are far below their last bit; rounded to the nearest they would
    stay where they are. What is drawn depends on `key` and on a number's place alone: rows are counted from `first`,
    so that a part of an array is rounded as in the whole. Infinities and NaN stay.
    Source: Gupta et al. 2015, arXiv 1502.02551; of the bits that bf16 drops, Zamirai et al. 2020, arXiv 2010.06192.
    """

    def bits(row: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, row), x.shape[1:], jnp.uint16)

    dropped = jax.vmap(bits)(first + jnp.arange(x.shape[0]))
    whole = jax.lax.bitcast_convert_type(x, jnp.uint32) + dropped.astype(jnp.uint32)
    kept = jax.lax.bitcast_convert_type(whole & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), kept, x).astype(jnp.bfloat16)


def check_elementwise(rule: optax.GradientTransformation | None) -> None:
    """Raises ValueError for an optimizer of which a part of an array needs to know the rest.

    Tried on two small matrices, whole and row by row.
    """
    if rule is None:
        return
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        params, grads = ({n: jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) for n in ("wq", "w_up")} for _ in "ab")

        def changes(params: Any, grads: Any) -> Any:
            return rule.update(grads, rule.init(params), params)[0]

        def rows(tree: Any, i: int) -> Any:
            return jax.tree.map(lambda a: a[i : i + 1], tree)

        whole = changes(params, grads)
        try:
            alone = [changes({"wq": rows(params, i)["wq"]}, {"wq": rows(grads, i)["wq"]}) for i in range(4)]
            same = all(np.allclose(rows(whole, i)["wq"], part["wq"], rtol=1e-5) for i, part in enumerate(alone))
        except Exception:  # of whatever kind: it cannot compute a part
            same = False
    if not same:
        raise ValueError(
            "this optimizer changes a row of a matrix otherwise when it sees the rest of the matrix, or other "
            "matrices: layers and pieces of tables are updated one by one here. Expected an elementwise one, such as "
            "optax.adamw, optax.lion or optax.sgd; clipping is said in TrainSettings(clip=..., clip_norm=...)."
        )


def check_rounding(settings: TrainSettings, params: Any) -> None:
    """Raises ValueError for stochastic rounding of what is not bf16."""
    others = {str(leaf.dtype) for leaf in jax.tree.leaves(params)} - {"bfloat16"}
    if settings.rounding == "stochastic" and others:
        raise ValueError(
            f"TrainSettings(rounding='stochastic') with weights in {', '.join(sorted(others))}: it is for bf16 weights "
            "without a wider copy. Choose LlamaConfig(param_dtype=jnp.bfloat16), or leave rounding='nearest'."
        )


def check_mesh(settings: TrainSettings, mesh: MeshShape) -> None:
    """Raises ValueError for settings that are computed on one device alone."""
    if mesh.devices > 1 and settings.clip == "layer":
        raise ValueError(
            f"TrainSettings(clip='layer') on a mesh {mesh.axes}: norms of layers are computed on one device. Leave "
            "clip='global'."
        )
    if mesh.devices > 1 and settings.rounding == "stochastic":
        raise ValueError(
            f"TrainSettings(rounding='stochastic') on a mesh {mesh.axes}: what is drawn would depend on how arrays are "
            "split. Leave rounding='nearest'."
        )
