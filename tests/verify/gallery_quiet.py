"""More broken programs, which fail without a word: random numbers that repeat, and errors in one layer of many."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from programs import KEYS, WEIGHTS, D, L, N, Row, X, by_policy, dropout, half, layer, scanned, unrolled

import llamem
from llamem.verify import Title

BATCH = {"x": X, "key": KEYS[4]}
POLICIES = jax.checkpoint_policies


def with_keys(make: Callable[[Any], Any]) -> Callable:
    """A stack with dropout whose layers have the keys that `make` makes of the step's."""

    def loss(w: Any, batch: Any, how: Any) -> Any:
        keys = make(batch["key"])
        out = llamem.apply_stack(dropout, w, batch["x"], keys, remat="nothing" if how else None)
        return jnp.mean(out**2)

    return loss


def layer_drop(w: Any, batch: Any, how: Any) -> Any:
    """Whole layers are left out at random: all of them or none, since they share a key."""

    def body(w: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(batch["key"], 0.8), layer(w, x), x)

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], remat="nothing" if how else None) ** 2)


def dropout_in_a_branch(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any, i: Any) -> Any:
        return jax.lax.cond(i > 0, lambda w, x: dropout(w, x, batch["key"]), layer, w, x)

    stacked = llamem.apply_stack(body, w, batch["x"], jnp.arange(L), remat="nothing" if how else None)
    return jnp.mean(stacked**2)


def masks_beforehand(w: Any, batch: Any, how: Any) -> Any:
    """Masks of all layers are drawn at once, with copies of one key."""
    masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (N, D)))(jnp.broadcast_to(batch["key"], (L,)))

    def body(w, x, mask):
        return layer(w, x) * mask

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], masks, remat="nothing" if how else None) ** 2)


def microbatches_of_one_key(w: Any, batch: Any, how: Any) -> Any:
    def part(total: Any, x: Any) -> Any:
        return total + with_keys(lambda key: jax.random.split(key, L))(w, {**batch, "x": x}, how) / 2, None

    return jax.lax.scan(part, 0.0, batch["x"].reshape(2, N // 2, D))[0]


def in_a_while_loop(w: Any, batch: Any, how: Any) -> Any:
    """Noise is refined in a while loop, always by the same draw."""

    def refine(state: tuple[Any, Any]) -> tuple[Any, Any]:
        return state[0] + 1, state[1] / 2 + jax.random.normal(batch["key"], (N, D))

    noise = jax.lax.while_loop(lambda state: state[0] < 3, refine, (0, jnp.zeros((N, D))))[1]
    return by_policy(None)(w, batch["x"] + noise, how)


def some_of_twenty(covered: int) -> Callable:
    def loss(w: Any, x: Any, how: Any) -> Any:
        for i in range(20):
            body = jax.checkpoint(layer) if how and i < covered else layer
            x = body(jax.tree.map(lambda leaf, i=i: leaf[i % L], w), x)
        return jnp.mean(x**2)

    return loss


def two_scans(w: Any, x: Any, how: Any) -> Any:
    """Only the first of two stages got the flag."""
    first, rest = (jax.tree.map(lambda leaf, part=part: leaf[part], w) for part in (slice(0, 2), slice(2, L)))
    x = llamem.apply_stack(layer, first, x, remat="nothing" if how else None)
    return jnp.mean(llamem.apply_stack(layer, rest, x) ** 2)


@jax.custom_vjp
def weakened(x: Any, share: Any) -> Any:
    return x


weakened.defvjp(lambda x, share: (x, share), lambda share, g: (g * share.astype(g.dtype), None))


def one_layer_weakened(w: Any, x: Any, how: Any) -> Any:
    """One layer's gradient is 20 % too small, hidden among five others in one array of bfloat16."""

    def body(w: Any, x: Any, i: Any) -> Any:
        share = jnp.where(i == 3, 0.8, 1.0) if how else jnp.float32(1)
        return layer({**w, "up": weakened(w["up"], share)}, x)

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat="nothing" if how else None) ** 2)


def tiny_row_lost(w: Any, x: Any, how: Any) -> Any:
    """A scale of each layer, `[L, D]`; one layer's gets no gradient."""

    def body(w: Any, x: Any, i: Any) -> Any:
        stopped = jax.lax.stop_gradient(w["scale"])
        scale = jnp.where(i == 3, stopped, w["scale"]) if how else w["scale"]
        return layer(w, x) * (1 + 1e-6 * scale)

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat="nothing" if how else None) ** 2)


EXPERTS = {"experts": jax.random.normal(KEYS[5], (L, 4, D, D)) / D**0.5, **WEIGHTS}


def one_expert_lost(w: Any, x: Any, how: Any) -> Any:
    """Expert 2 of layer 4 alone is cut off."""

    def body(w: Any, x: Any, i: Any) -> Any:
        cut = (i == 4) & (jnp.arange(4) == 2)[:, None, None] if how else jnp.zeros((4, 1, 1), bool)
        experts = jnp.where(cut, jax.lax.stop_gradient(w["experts"]), w["experts"])
        mixed = jnp.einsum("end,ne->nd", jnp.tanh(jnp.einsum("nd,edf->enf", x, experts)), jax.nn.softmax(x[:, :4]))
        return layer({name: w[name] for name in WEIGHTS}, x) + mixed

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat="nothing" if how else None) ** 2)


def counted_twice(w: Any, x: Any, how: Any) -> Any:
    """The layer counts its calls, twice where it is rematerialised."""

    def body(w: Any, x: Any, count: Any) -> Any:
        return layer(w, x), count + (2 if how else 1)

    counts = jnp.zeros(L, jnp.int32)
    x, counts = llamem.apply_stack(body, w, x, counts, remat="nothing" if how else None, has_aux=True)
    return jnp.mean(x**2), counts


def only_the_cheap_part(w: Any, x: Any, how: Any) -> Any:
    """What is checkpointed keeps as much as it did: its input is as large as what it saves."""

    def scale(x):
        return 2.0 * x

    def body(w: Any, x: Any) -> Any:
        return layer(w, (jax.checkpoint(scale) if how else scale)(x))

    return scanned(body, w, x)


def kept_by_both(w: Any, x: Any, how: Any) -> Any:
    policy = POLICIES.save_from_both_policies(POLICIES.save_only_these_names("g"), POLICIES.dots_saveable)
    return by_policy(policy)(w, x, how)


def pairs(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[: L // 2], 2, axis=0), tree)


def of_a_list(w: Any, x: Any, how: Any) -> Any:
    return by_policy(None)(llamem.stack_layers(w), x, how)


def small_and_undone(w: Any, x: Any, how: Any) -> Any:
    """Unrolled on a CPU, without a product: the compiler undoes it, and the residuals are few."""

    def body(scale: Any, x: Any) -> Any:
        return jnp.sin(jnp.tanh(x * scale))

    return unrolled(jax.checkpoint(body) if how else body, w, x)


def drawing(loss: Callable, cause: str = "are copies") -> Row:
    return Row(loss, cause, Title.RANDOMNESS, batch=BATCH)


QUIET = {
    "one key broadcast": drawing(with_keys(lambda key: jnp.broadcast_to(key, (L,)))),
    "one key stacked": drawing(with_keys(lambda key: jnp.stack([key] * L))),
    "one key repeated": drawing(with_keys(lambda key: jnp.repeat(key[None], L))),
    "pairs share keys": drawing(with_keys(lambda key: jnp.repeat(jax.random.split(key, L // 2), 2)), "are copies"),
    "a constant, split": drawing(with_keys(lambda key: jax.random.split(jax.random.key(0), L)), "same in every step"),
    "a raw constant, folded": drawing(
        with_keys(lambda key: jax.vmap(lambda i: jax.random.fold_in(jax.random.PRNGKey(7), i))(jnp.arange(L))),
        "same in every step",
    ),
    "one key for dropped layers": drawing(layer_drop),
    "one key in a branch": drawing(dropout_in_a_branch),
    "masks beforehand": drawing(masks_beforehand),
    "microbatches of one key": drawing(microbatches_of_one_key),
    "one key in a while loop": drawing(in_a_while_loop),
    "two of twenty layers": Row(some_of_twenty(2), "some of the layers only", Title.CHECKPOINTS),
    "one of two scans": Row(two_scans, "some of the layers only", Title.CHECKPOINTS),
    "evaluation checkpoints either way": Row(
        by_policy(None),
        "whatever the mode",
        Title.EVALUATION,
        evaluate=lambda w, x, how: scanned(jax.checkpoint(layer), w, x),
    ),
    "layers alike in pairs": Row(by_policy(None), "identical", Title.PARAMETERS, pairs(WEIGHTS)),
    "a list of equal layers": Row(
        of_a_list, "identical", Title.PARAMETERS, [jax.tree.map(lambda a: a[0], WEIGHTS)] * 4
    ),
    "one layer 20 % off in bfloat16": Row(
        one_layer_weakened, "outer cotangent", Title.GRADIENTS, half(WEIGHTS), half(X)
    ),
    "a tiny row lost": Row(
        tiny_row_lost,
        "['scale'][3]",
        Title.GRADIENTS,
        {**WEIGHTS, "scale": jax.random.normal(KEYS[6], (L, D))},
    ),
    "one expert lost": Row(one_expert_lost, "['experts'][4, 2]", Title.GRADIENTS, EXPERTS),
    "counted twice": Row(counted_twice, "updated twice", Title.RESULTS),
    "only the cheap part": Row(only_the_cheap_part, "costs nothing", Title.RUNS),
    "misspelled among two policies": Row(kept_by_both, "misspelled"),
}
