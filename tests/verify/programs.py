"""What the programs of these tests share: a small stack of layers, its data, and how a failure is written down."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import llamem
from llamem.verify import Proof, Title
from llamem.verify.proofs import PROOFS

L, N, D = 6, 512, 32
KEYS = jax.random.split(jax.random.key(0), 8)
WEIGHTS = {
    "up": jax.random.normal(KEYS[0], (L, D, 4 * D)) / D**0.5,
    "down": jax.random.normal(KEYS[1], (L, 4 * D, D)) / (4 * D) ** 0.5,
}
X = jax.random.normal(KEYS[2], (N, D))


def half(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def layer(w: Any, x: Any) -> Any:
    h = checkpoint_name(x @ w["up"], "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


def scanned(layer: Callable, w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)


def unrolled(layer: Callable, w: Any, x: Any) -> Any:
    for i in range(L):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x)
    return jnp.mean(x**2)


def by_policy(policy: Any, layer: Callable = layer, **options: Any) -> Callable:
    """A scan whose layer is checkpointed under a policy of JAX's."""

    def loss(w: Any, x: Any, how: Any) -> Any:
        return scanned(jax.checkpoint(layer, policy=policy, **options) if how else layer, w, x)

    return loss


def dropout(w: Any, x: Any, key: Any) -> Any:
    return layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def with_dropout(w: Any, batch: Any, remat: Any) -> Any:
    """Right: every layer has a key of its own."""
    keys = jax.random.split(batch["key"], L)
    return jnp.mean(llamem.apply_stack(dropout, w, batch["x"], keys, remat=remat) ** 2)


def proved(
    title: Any, loss: Any, params: Any, batch: Any, remat: Any = "nothing", baseline: Any = None, **more: Any
) -> Proof:
    """One proof alone, or the failure that stands in its place."""
    others = set(PROOFS) - {title}
    answer = llamem.verify_remat(loss, params, batch, remat=remat, baseline=baseline, skip=others, **more)
    (proof,) = (one for one in answer.proofs if not one.skipped)
    return proof


@dataclasses.dataclass(frozen=True)
class Row:
    """A failure: the program, the words of the cause that must be named, and the proof that should name it."""

    loss: Callable
    cause: str
    proof: Title = Title.OPTIONS
    params: Any = None
    batch: Any = None
    evaluate: Callable | None = None
