"""What the programs of these tests share: a small stack of layers, its data, and two tables to enter in."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
import llamem
from jaxmem import Proof, Title
from jaxmem.verify.proofs import PROOFS

POLICIES = jax.checkpoint_policies
L, N, D = 6, 512, 32
KEYS = jax.random.split(jax.random.key(0), 8)
WEIGHTS = {
    "up": jax.random.normal(KEYS[0], (L, D, 4 * D)) / D**0.5,
    "down": jax.random.normal(KEYS[1], (L, 4 * D, D)) / (4 * D) ** 0.5,
}
X = jax.random.normal(KEYS[2], (N, D))
BATCH = {"x": X, "key": KEYS[7]}


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss with its data: the proof that must fail and the words of its cause, or how it is computed and options."""

    loss: Callable
    params: Any
    batch: Any
    title: Title = Title.OPTIONS
    cause: str = ""
    how: Any = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


BROKEN: dict[str, Program] = {}
SOUND: dict[str, Program] = {}


def broken(title: Title, cause: str = "", params: Any = WEIGHTS, batch: Any = X, **options: Any) -> Callable:
    """Enter a loss in the table under its name: this proof must fail, with these words in what it says."""

    def enter(loss: Callable) -> Callable:
        BROKEN[loss.__name__.replace("_", " ")] = Program(loss, params, batch, title, cause, options=options)
        return loss

    return enter


def sound(params: Any = WEIGHTS, batch: Any = X, how: Any = True, **options: Any) -> Callable:
    """Enter a loss in the table under its name: no proof may fail."""

    def enter(loss: Callable) -> Callable:
        SOUND[loss.__name__.replace("_", " ")] = Program(loss, params, batch, how=how, options=options)
        return loss

    return enter


def half(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def normal(i: int, *shape: int) -> Any:
    values = np.random.default_rng(i).normal(size=shape) / shape[-2 if len(shape) > 1 else 0] ** 0.5
    return jnp.asarray(values, jnp.float32)


def layer(w: Any, x: Any) -> Any:
    h = checkpoint_name(x @ w["up"], "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


def dropout(w: Any, x: Any, key: Any) -> Any:
    return layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def standardised(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def scanned(layer: Callable, w: Any, x: Any, unroll: int | bool = 1) -> Any:
    """JAX's own scan, and the mean of the squares."""
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, unroll=unroll)[0] ** 2)


def unrolled(layer: Callable | list[Any], w: Any, x: Any, n: int = L) -> Any:
    for i in range(n):
        x = (layer[i] if isinstance(layer, list) else layer)(jax.tree.map(lambda leaf, i=i: leaf[i % L], w), x)
    return jnp.mean(x**2)


def stack(body: Callable, w: Any, x: Any, how: Any, *inputs: Any, **options: Any) -> Any:
    """The package's scan; `how`: a policy, or a flag."""
    remat = {True: "nothing", False: None}[how] if isinstance(how, bool) else how
    return llamem.apply_stack(body, w, x, *inputs, remat=remat, **options)


def stacked(body: Callable, w: Any, x: Any, how: Any, *inputs: Any, **options: Any) -> Any:
    return jnp.mean(stack(body, w, x, how, *inputs, **options) ** 2)


def in_mode(mode: str) -> Callable:
    return lambda w, x, how: stacked(layer, w, x, how, mode=mode)


def by_policy(policy: Any, layer: Callable = layer, **options: Any) -> Callable:
    """A scan whose layer is checkpointed under a policy of JAX's."""

    def loss(w: Any, x: Any, how: Any) -> Any:
        return scanned(jax.checkpoint(layer, policy=policy, **options) if how else layer, w, x)

    return loss


def offloaded(place: str) -> Any:
    return POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=place
    )


def with_keys(make: Callable[[Any], Any]) -> Callable:
    """A stack with dropout whose layers have the keys that `make` makes of the step's."""
    return lambda w, batch, how: stacked(dropout, w, batch["x"], how, make(batch["key"]))


def split(key: Any) -> Any:
    return jax.random.split(key, L)


with_dropout = with_keys(split)


class Block(linen.Module):
    """A block of flax linen with dropout, scanned and rematerialised by linen's own transforms."""

    @linen.compact
    def __call__(self, x: Any, _: None) -> tuple[Any, None]:
        h = jnp.sin(jnp.tanh(linen.Dense(4 * D)(linen.LayerNorm()(x))))
        return x + linen.Dropout(0.1, deterministic=False)(linen.Dense(D)(h)), None


def linen_stack(how: Any, dropout: bool) -> linen.Module:
    block = linen.remat(Block, prevent_cse=False) if how else Block
    return linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": dropout}, length=L)()


LINEN = linen_stack(False, True).init(KEYS[2], X, None)


def linen_transforms(dropout: bool) -> Callable:
    def loss(w: Any, batch: Any, how: Any) -> Any:
        x: Any = linen_stack(how, dropout).apply(w, batch["x"], None, rngs={"dropout": batch["key"]})
        return jnp.mean(x[0] ** 2)

    return loss


class Noisy(nnx.Module):
    """A layer with all the state that nnx knows: weights, batch statistics, keys and counts of draws."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(D, 4 * D, rngs=rngs)
        self.outer = nnx.Linear(4 * D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(x + self.outer(jnp.sin(jnp.tanh(self.inner(x))))))


NOISY = nnx.graphdef(Noisy(nnx.Rngs(0)))
_WEIGHTS, _STATE = nnx.split_state(jax.vmap(lambda key: nnx.state(Noisy(nnx.Rngs(key))))(KEYS[:L]), nnx.Param, ...)
NOISY_CASE = _WEIGHTS, {"x": X, "state": _STATE}


def proved(
    title: Any, loss: Any, params: Any, batch: Any, remat: Any = "nothing", baseline: Any = None, **more: Any
) -> Proof:
    """One proof alone, or the failure that stands in its place."""
    others = set(PROOFS) - {title}
    answer = jaxmem.verify_remat(loss, params, batch, remat=remat, baseline=baseline, skip=others, **more)
    (proof,) = (one for one in answer.proofs if not one.skipped)
    return proof
