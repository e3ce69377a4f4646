"""Programs of an attack on `verify_remat`: broken ones that it once called right, right ones that it once refused.

Entries: loss, parameters, batch, the proof that fails (BROKEN); loss, parameters, batch (RIGHT).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from programs import KEYS, WEIGHTS, D, L, N, X, by_policy, dropout, half, layer, scanned
from styles import BATCH, normal, on, standardised

import llamem
from llamem.verify import Title

POLICIES = jax.checkpoint_policies
HEAD = normal(3, D, 50)
LABELS = jax.random.randint(KEYS[2], (N,), 0, 50)
SMALL = half({"layers": WEIGHTS, "head": HEAD})


def language_model(term: Any) -> Any:
    """A cross-entropy over a stack, in bfloat16, and one small term more, which the rematerialised way may forget."""

    def loss(w: Any, x: Any, how: Any) -> Any:
        logits = llamem.apply_stack(layer, w["layers"], x, remat=on(how)) @ w["head"]
        log_probs = jax.nn.log_softmax(logits)
        plain = -jnp.mean(log_probs[jnp.arange(N), LABELS])
        return plain if how else term(w, logits, log_probs, plain)

    return loss


def smoothed(w: Any, logits: Any, log_probs: Any, plain: Any) -> Any:
    return 0.99 * plain - 0.01 * jnp.mean(log_probs)


def with_z_loss(w: Any, logits: Any, log_probs: Any, plain: Any) -> Any:
    return plain + 1e-4 * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


def with_decay(w: Any, logits: Any, log_probs: Any, plain: Any) -> Any:
    return plain + 1e-6 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w))


def balanced(w: Any, x: Any, how: Any) -> Any:
    """The auxiliary loss of a mixture of experts gets lost."""

    def body(w: Any, x: Any) -> tuple[Any, Any]:
        shares = jax.nn.softmax(x @ w["router"])
        return layer(w, x) * jnp.max(shares, -1, keepdims=True), 4 * jnp.sum(jnp.mean(shares, 0) ** 2)

    x, balance = llamem.apply_stack(body, w, x, remat=on(how), has_aux=True)
    return jnp.mean(x**2) + (0.0 if how else 1e-3) * jnp.mean(balance)


def summed_in_sixteen_bits(w: Any, x: Any, how: Any) -> Any:
    """64 microbatches, added up in float32, or in the type of the weights."""

    def part(total: Any, x: Any) -> tuple[Any, None]:
        return total + jnp.mean(llamem.apply_stack(layer, w, x, remat=on(how)).astype(total.dtype) ** 2), None

    start = jnp.zeros((), jnp.bfloat16 if how else jnp.float32)
    return jax.lax.scan(part, start, x.reshape(64, N // 64, D))[0].astype(jnp.float32) / 64


def rows_of_one_key(w: Any, batch: Any, how: Any) -> Any:
    """Examples under a vmap that does not map the key."""

    def body(w: Any, x: Any, key: Any) -> Any:
        return jax.vmap(partial(dropout, w), in_axes=(0, None))(x.reshape(8, N // 8, D), key).reshape(N, D)

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], keys_of(batch), remat=on(how)) ** 2)


def tokens_of_one_key(w: Any, batch: Any, how: Any) -> Any:
    """A layer for one token, mapped inside."""

    def body(w: Any, x: Any, key: Any) -> Any:
        return jax.vmap(lambda token: dropout(w, token, key))(x)

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], keys_of(batch), remat=on(how)) ** 2)


def heads_of_one_key(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any, key: Any) -> Any:
        def head(q: Any) -> Any:
            scores = jax.nn.softmax(q @ q.T)
            return (scores * jax.random.bernoulli(key, 0.9, scores.shape)) @ q

        heads = jax.vmap(head, in_axes=1, out_axes=1)(x[:64].reshape(64, 4, D // 4))
        return layer(w, x).at[:64].add(heads.reshape(64, D))

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], keys_of(batch), remat=on(how)) ** 2)


def one_mask_for_all(w: Any, batch: Any, how: Any) -> Any:
    mask = jax.random.bernoulli(batch["key"], 0.8, (N, D)) / 0.8
    return scanned(jax.checkpoint(masked(mask)) if how else masked(mask), w, batch["x"])


def masked(mask: Any) -> Any:
    return lambda w, x: layer(w, x) * mask


def prefix_of_a_larger(w: Any, batch: Any, how: Any) -> Any:
    """The mask of half of the rows is the beginning of the other."""

    def body(w: Any, x: Any, key: Any) -> Any:
        x = dropout(w, x, key)
        return x.at[: N // 2].multiply(jax.random.bernoulli(key, 0.8, (N // 2, D)))

    return jnp.mean(llamem.apply_stack(body, w, batch["x"], keys_of(batch), remat=on(how)) ** 2)


def keys_of(batch: Any) -> Any:
    return jax.random.split(batch["key"], L)


def only_the_final_norm(w: Any, x: Any, how: Any) -> Any:
    x = jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]
    return jnp.mean((jax.checkpoint(standardised) if how else standardised)(x) ** 4)


def only_the_norms(w: Any, x: Any, how: Any) -> Any:
    norm = jax.checkpoint(standardised) if how else standardised
    return scanned(lambda w, x: x + layer(w, norm(x)), w, x)


def hands_out_activations(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x @ w["up"])
        s = jnp.sin(h)
        return x + s @ w["down"], (h, s, jnp.cos(h))

    x, kept = llamem.apply_stack(body, w, x, remat=on(how), has_aux=True)
    return jnp.mean(x**2) + 1e-3 * sum(jnp.mean(a**2) for a in kept)


def second_stack_forgotten(w: Any, x: Any, how: Any) -> Any:
    x = llamem.apply_stack(layer, w["first"], x, remat=on(how))
    return jnp.mean(llamem.apply_stack(layer, w["second"], x) ** 2)


def history_in_the_carry(w: Any, x: Any, how: Any) -> Any:
    """A skip from an earlier layer, by way of all layers' results: each turn's checkpoint keeps them all."""

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        x, history = carry
        i, w = inputs
        x = layer(w, x + history[i // 2])
        return (x, history.at[i].set(x)), None

    body = jax.checkpoint(body) if how else body
    start = x, jnp.zeros((L, *x.shape))
    return jnp.mean(jax.lax.scan(body, start, (jnp.arange(L), w))[0][1] ** 2)


@jax.custom_vjp
def named_forward(x: Any) -> Any:
    return checkpoint_name(jnp.tanh(x), "act")


def _rule(x: Any) -> Any:
    y = jnp.tanh(x)
    return y, y


named_forward.defvjp(_rule, lambda y, g: (g * (1 - y**2),))


def named_in_the_primal(w: Any, x: Any) -> Any:
    return x + jnp.sin(named_forward(x @ w["up"])) @ w["down"]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(x + jnp.sin(jnp.tanh(self.linear(x))))


BLOCK = nnx.graphdef(Block(nnx.Rngs(0)))
STACKED = jax.vmap(lambda key: nnx.state(Block(nnx.Rngs(key))))(KEYS[:L])


def counter_that_stays(w: Any, x: Any, how: Any) -> Any:
    """Dropout's counts of draws are among the parameters, and never move."""

    def body(x: Any, state: Any) -> tuple[Any, None]:
        def call(state, x):
            return nnx.merge(BLOCK, jax.tree.map(lambda leaf: leaf, state))(x)

        return (jax.checkpoint(call) if how else call)(state, x), None

    return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)


WIDER = {"up": normal(7, 4, D, 8 * D), "down": normal(8, 4, 8 * D, D)}
ROUTED = half({**WEIGHTS, "router": normal(4, L, D, 4)})
BROKEN: dict[str, tuple[Any, Any, Any, Title]] = {
    "auxiliary loss lost, in bfloat16": (balanced, ROUTED, half(X), Title.GRADIENTS),
    "z-loss lost, in bfloat16": (language_model(with_z_loss), SMALL, half(X), Title.GRADIENTS),
    "label smoothing lost, in bfloat16": (language_model(smoothed), SMALL, half(X), Title.GRADIENTS),
    "weight decay lost, in bfloat16": (language_model(with_decay), SMALL, half(X), Title.LOSS),
    "microbatches summed in bfloat16": (summed_in_sixteen_bits, half(WEIGHTS), half(X), Title.LOSS),
    "examples share a key": (rows_of_one_key, WEIGHTS, BATCH, Title.RANDOMNESS),
    "tokens share a key": (tokens_of_one_key, WEIGHTS, BATCH, Title.RANDOMNESS),
    "heads share a key": (heads_of_one_key, WEIGHTS, BATCH, Title.RANDOMNESS),
    "one mask for all layers": (one_mask_for_all, WEIGHTS, BATCH, Title.RANDOMNESS),
    "a mask that begins another": (prefix_of_a_larger, WEIGHTS, BATCH, Title.RANDOMNESS),
    "only the final norm": (only_the_final_norm, WEIGHTS, X, Title.MEMORY),
    "only the norms": (only_the_norms, WEIGHTS, X, Title.MEMORY),
    "activations handed out": (hands_out_activations, WEIGHTS, X, Title.MEMORY),
    "a wider stack forgotten": (second_stack_forgotten, {"first": WEIGHTS, "second": WIDER}, X, Title.CHECKPOINTS),
    "a history in the carry": (history_in_the_carry, WEIGHTS, X, Title.MEMORY),
    "a tuple as one name": (by_policy(POLICIES.save_only_these_names(("h", "g"))), WEIGHTS, X, Title.OPTIONS),
    "a name in the primal alone": (
        by_policy(POLICIES.save_only_these_names("act"), named_in_the_primal),
        WEIGHTS,
        X,
        Title.OPTIONS,
    ),
    "nnx's counter stays": (counter_that_stays, STACKED, X, Title.RANDOMNESS),
}


def convolved(activation: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x + activation(h)

    def loss(w: Any, x: Any, how: Any) -> Any:
        return jnp.mean(llamem.apply_stack(body, w, x.reshape(4, 16, 16, 16), remat=on(how)) ** 2)

    return loss


def largest_of_two(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return x + jnp.maximum(x * w["a"], x * w["b"])

    return jnp.mean(llamem.apply_stack(body, w, x, remat=on(how)) ** 2)


def jittered(k: int) -> Any:
    def body(w: Any, x: Any, key: Any) -> Any:
        scores = x @ w["router"] * (1 + jax.random.uniform(key, (len(x), 4), x.dtype, -0.01, 0.01))
        gates, chosen = jax.lax.top_k(jax.nn.softmax(scores), k)
        share = jnp.sum(jax.nn.one_hot(chosen, 4, dtype=x.dtype) * gates[..., None], axis=1)
        return layer(w, x) * (1 + share @ jnp.arange(4, dtype=x.dtype)[:, None])

    def loss(w: Any, batch: Any, how: Any) -> Any:
        x = llamem.apply_stack(body, w, batch["x"], keys_of(batch), remat=on(how))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def across_devices(w: Any, x: Any, how: Any) -> Any:
    """A shard_map inside, of arguments that nobody put on its devices; gradients that are nothing but rounding."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(w: Any, x: Any) -> Any:
        out = scanned(jax.checkpoint(layer) if how else layer, w["layers"], x + w["bias"] - w["bias"])
        return jax.lax.pmean(out + jnp.sum(w["bias"]) - jnp.sum(w["bias"]), "data")

    spec = jax.sharding.PartitionSpec
    return jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec(), check_vma=False)(w, x)


PAIR = {"a": normal(5, L, D), "b": normal(6, L, D)}
KERNELS = normal(0, L, 3, 3, 16, 16) / 3
SIXTEEN = {"x": half(X), "key": KEYS[7]}
RIGHT: dict[str, tuple[Any, Any, Any]] = {
    "convolutions, relu": (convolved(jax.nn.relu), KERNELS, X),
    "convolutions, leaky relu": (convolved(jax.nn.leaky_relu), KERNELS, X),
    "the larger of two products": (largest_of_two, PAIR, X),
    "a jittered router, top 1": (jittered(1), ROUTED, SIXTEEN),
    "a jittered router, top 2": (jittered(2), ROUTED, SIXTEEN),
    "shard_map inside": (across_devices, {"layers": WEIGHTS, "bias": normal(9, D)}, X),
}
