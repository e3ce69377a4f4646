"""What turns gradients into new weights: clipping, AdamW, rounding. Of all of a model or of a part."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float32, Int, PRNGKeyArray, UInt32

from llamem.layers.custom_rules import combine, partition
from llamem.llama.weights import parameter_name
from llamem.train.settings import Rounding, TrainSettings

_EPS = 1e-8

# Of gradients, moments, parameters, and the number of the first row or layer that these arrays have of the whole ones:
# the new parameters and the new moments.
UpdateRule = Callable[..., tuple[Any, Any]]


def make_schedule(settings: TrainSettings) -> optax.Schedule:
    """Return the learning rate as a function of the updates done: warm-up in a line, then a cosine to a tenth.

    A warm-up of `steps` or more ends at the last step but one: the rate has its peak in the last.
    """
    warmup, peak = min(settings.warmup_steps, settings.steps - 1), settings.learning_rate
    return optax.warmup_cosine_decay_schedule(peak / max(warmup, 1), peak, warmup, settings.steps, peak / 10)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Return AdamW at the rates of `make_schedule`; clipping is not part of it.

    AdamW's betas are 0.9 and 0.95, and norms do not decay. Its `init` raises ValueError for parameters in a type that
    cannot hold AdamW's eps, such as float16.
    """

    def decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    adamw = optax.adamw(
        make_schedule(settings), b1=0.9, b2=0.95, eps=_EPS, weight_decay=settings.weight_decay, mask=decayed
    )

    def init(params: Any) -> Any:
        for path, param in jax.tree.leaves_with_path(params):
            check_trained_type(jax.tree_util.keystr(path), param.dtype)
        return adamw.init(params)

    return adamw._replace(init=init)


def check_trained_type(name: str, dtype: Any) -> None:
    """Raise ValueError for a type in which no parameter can be trained; `name` is who has it."""
    if jnp.finfo(dtype).smallest_subnormal > _EPS:
        raise ValueError(
            f"{name} is {jnp.dtype(dtype).name}, and cannot be trained as it is: AdamW divides by the root of a mean "
            f"of squared gradients plus {_EPS}. Both are 0 in that type, and the weights would be NaN after one "
            "update. Choose LlamaConfig(param_dtype='bfloat16') or 'float32'; products may stay in it (compute_dtype), "
            "and adapters train over frozen weights in it."
        )


def clip(settings: TrainSettings, grads: Any, norm: Array) -> Any:
    """Return gradients within `settings.clip_norm`: all by `norm`, the norm of all, or each layer by its own.

    With `clip="layer"` what is in no layer is clipped array by array. `optax.clip_by_global_norm` would take the norm
    of one device's part.
    """
    max_norm = settings.clip_norm
    if settings.clip == "global" or max_norm is None:
        return within(grads, norm, max_norm)
    squares_L: Any = sum(
        jnp.sum(jnp.square(_wide(grad)), axis=tuple(range(1, grad.ndim)))
        for path, grad in jax.tree.leaves_with_path(grads)
        if is_stacked(path)
    )

    def clipped(path: tuple[Any, ...], grad: Array) -> Array:
        if not is_stacked(path):
            return within(grad, norm_of(grad), max_norm)
        return within(grad, jnp.sqrt(squares_L).reshape(-1, *(1,) * (grad.ndim - 1)), max_norm)

    return jax.tree.map_with_path(clipped, grads)


def within(grads: Any, norm: Array, max_norm: float | None) -> Any:
    """Return gradients whose norm is `norm`, or a part of them, scaled down to `max_norm`; None: as they are."""
    if max_norm is None:
        return grads
    return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm), grads)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Return whether a leaf is of the stacked layers, and so has them as its first axis."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def sum_of_squares(grads: Any) -> Array:
    """Return the sum of the squares of all gradients, in f32."""
    return sum((jnp.sum(jnp.square(_wide(grad))) for grad in jax.tree.leaves(grads)), start=jnp.zeros(()))


def norm_of(grads: Any) -> Array:
    """Return the norm of gradients on one device, whatever they are of."""
    return jnp.sqrt(sum_of_squares(grads))


def _wide(grad: Array) -> Array:
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


def split_counters(opt_state: Any) -> tuple[Any, Any]:
    """Return what of AdamW's state counts updates, and the moments: each tree with None for the other."""
    return partition(opt_state, lambda path, _: parameter_name(path) is None)


def start_of_whole(path: tuple[Any, ...], param: Array) -> list[Any]:
    """Return where a parameter that is all here begins in the whole one, along each axis."""
    return [0] * param.ndim


def make_update(
    settings: TrainSettings, step: Array, counters: Any, start_of_part: Callable[..., list[Any]] = start_of_whole
) -> UpdateRule:
    """Return `update(grads, moments, params, first=0)`: new parameters, rounded as the settings say, and new moments.

    They may be a part of all; `first` is the number of the first row or layer that the arrays have of the whole ones.
    `step` is the number of updates before this one, `counters` what of AdamW's state counts them.
    `start_of_part(path, param)` says where an array begins in the whole parameter, along each axis.
    """
    optimizer = make_optimizer(settings)

    def update(grads: Any, moments: Any, params: Any, first: Any = 0) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, combine(counters, moments), params)
        _, moments = split_counters(opt_state)
        of_step = _mixed(_mixed(jnp.uint32(settings.seed % 2**32)) + jnp.asarray(step).astype(jnp.uint32))

        def add(path: tuple[Any, ...], param: Array, change: Array) -> Array:
            if rounding_of(settings, param.dtype) == "nearest":
                return (param + change).astype(param.dtype)
            of_parameter = _mixed(of_step ^ jnp.uint32(zlib.crc32(str(parameter_name(path)).encode())))
            start = start_of_part(path, param)
            start[0] += first
            return _rounded_by(of_parameter, param.astype(jnp.float32) + change.astype(jnp.float32), start)

        return jax.tree.map_with_path(add, params, updates), moments

    return update


def rounding_of(settings: TrainSettings, param_dtype: Any) -> Rounding:
    """Return how new weights of this type are rounded, "nearest" or "stochastic": what "auto" is for them."""
    return "stochastic" if settings.rounding != "nearest" and param_dtype == jnp.bfloat16 else "nearest"


def stochastically_rounded(
    x: Float32[Array, "*shape"], key: PRNGKeyArray, start: Sequence[int | Int[Array, ""]] = ()
) -> BFloat16[Array, "*shape"]:
    """Return each number as one of its two neighbours in bf16, the nearer one more often: on average the number itself.

    So weights without an f32 copy follow updates that are far below their last bit; rounded to the nearest they would
    stay where they are. What is drawn depends on `key` and on a number's place alone: places along the first axes are
    counted from `start`, so that a part of an array is rounded as in the whole. Infinities and NaN stay.
    Source: Gupta et al. 2015, arXiv 1502.02551; of the bits that bf16 drops, Zamirai et al. 2020, arXiv 2010.06192.
    """
    return _rounded_by(jax.random.bits(key, (), jnp.uint32), x, start)


def _rounded_by(
    seed: UInt32[Array, ""], x: Float32[Array, "*shape"], start: Sequence[int | Int[Array, ""]]
) -> BFloat16[Array, "*shape"]:
    start = (*start, *(0,) * (x.ndim - len(start)))
    # A hash of the place, and not `jax.random.bits` of the shape: its hundred operations per number would take longer
    # than the whole update, and a GPU's compiler would keep the bits in memory.
    drawn = jnp.broadcast_to(seed, x.shape)
    for axis, first in enumerate(start):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + jnp.asarray(first).astype(jnp.uint32)
        drawn = _mixed(drawn + place)
    whole = jax.lax.bitcast_convert_type(x, jnp.uint32) + (drawn >> 16)
    rounded = jax.lax.bitcast_convert_type(whole & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return other numbers, one for one, of which every bit depends on all bits: C. Wellons' hash-prospector, 2018."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)
