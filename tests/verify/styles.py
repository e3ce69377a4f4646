"""Correct programs in many styles of writing JAX: none of them may raise an alarm.

Each entry: the loss, parameters, batch, how with rematerialisation, further options of `verify_remat`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.ad_checkpoint import checkpoint_name
from programs import KEYS, WEIGHTS, D, L, N, X, dropout, half, layer, scanned

import llamem
from llamem import Policy

POLICIES = jax.checkpoint_policies
BATCH = {"x": X, "key": KEYS[7]}


def normal(i: int, *shape: int) -> Any:
    values = np.random.default_rng(i).normal(size=shape) / shape[-2 if len(shape) > 1 else 0] ** 0.5
    return jnp.asarray(values, jnp.float32)


def on(how: Any) -> Any:
    return "nothing" if how else None


def standardised(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# A bias of the keys shifts all scores of a query alike, so that its true gradient is 0: rounding is all there is.
VIT = {name: normal(i, L, D, D) for i, name in enumerate(("q", "k", "v", "o"))} | {"k_bias": normal(4, L, D)}


def vision_transformer(w: Any, images: Any, how: Any) -> Any:
    def block(w: Any, x: Any) -> Any:
        h = standardised(x)
        q, k, v = h @ w["q"], h @ w["k"] + w["k_bias"], h @ w["v"]
        scores = jax.nn.softmax(q @ k.swapaxes(1, 2) / D**0.5)
        return x + (scores @ v) @ w["o"]

    return jnp.mean(llamem.apply_stack(block, w, images.reshape(8, 64, D), remat=on(how)) ** 4)


CONVOLUTIONS = {"kernel": normal(0, L, 3, 3, 16, 16) / 3, "bias": normal(1, L, 16), "scale": jnp.ones((L, 16))}


def residual_network(w: Any, images: Any, how: Any) -> Any:
    """A bias in front of batch normalisation, which takes it away again."""

    def block(w: Any, x: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = h + w["bias"]
        h = (h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-5) * w["scale"]
        return x + jax.nn.relu(h)

    return jnp.mean(llamem.apply_stack(block, w, images.reshape(4, 16, 16, 16), remat=on(how)) ** 4)


def encoder_and_decoder(w: Any, x: Any, how: Any) -> Any:
    """One policy for both, whose names are given by one or the other."""

    def encode(w: Any, x: Any) -> Any:
        return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], "encoded"))) @ w["down"]

    def decode(w: Any, x: Any) -> Any:
        return x + jnp.tanh(jnp.sin(checkpoint_name(x @ w["up"], "decoded"))) @ w["down"]

    policy = POLICIES.save_only_these_names("encoded", "decoded")
    if how:
        encode, decode = jax.checkpoint(encode, policy=policy), jax.checkpoint(decode, policy=policy)
    encoded = jax.lax.scan(lambda x, w: (encode(w, x), None), x, w["encoder"])[0]
    return scanned(decode, w["decoder"], encoded)


def names_of_each_layer(w: Any, x: Any, how: Any) -> Any:
    policy = POLICIES.save_only_these_names("h0", "h2", "h4")
    for i in range(L):

        def body(w: Any, x: Any, i: int = i) -> Any:
            return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], f"h{i}"))) @ w["down"]

        x = (jax.checkpoint(body, policy=policy) if how else body)(jax.tree.map(lambda a, i=i: a[i], w), x)
    return jnp.mean(x**2)


def nested(w: Any, x: Any, remat: Any) -> Any:
    return jnp.mean(llamem.apply_stack(layer, w, x, mode="nested", remat=remat) ** 2)


def with_a_target(w: Any, x: Any, how: Any) -> Any:
    """Self-distillation: the target network starts as a copy, and is not trained."""
    target = llamem.apply_stack(layer, w["target"], x[::-1])
    out = llamem.apply_stack(layer, w["online"], x, remat=on(how))
    return jnp.mean((out - jax.lax.stop_gradient(target)) ** 2)


def recurrent(w: Any, batch: Any, how: Any) -> Any:
    """Variational dropout, drawn inside the loop: the same units at each step of time, as its inventors want it."""

    def step(w: Any, h: Any, x: Any) -> Any:
        h = h * jax.random.bernoulli(batch["key"], 0.8, h.shape)
        return jnp.tanh(x @ w["in"] + h @ w["out"])

    step = jax.checkpoint(step) if how else step
    xs = batch["x"].reshape(32, 16, D)
    return jnp.mean(jax.lax.scan(lambda h, x: (step(w, h, x), None), jnp.zeros((16, 256)), xs)[0] ** 2)


def fixed_projection(w: Any, x: Any, how: Any) -> Any:
    features = jax.random.normal(jax.random.key(3), (D, D)) / D**0.5
    return scanned(jax.checkpoint(layer) if how else layer, w, jnp.cos(x @ features))


def with_a_number(w: Any, x: Any, how: Any) -> Any:
    return w["scale"] * scanned(jax.checkpoint(layer) if how else layer, w["layers"], x)


CLOSED_OVER = jax.random.key(11)


def closed_over_key(w: Any, batch: Any, how: Any) -> Any:
    keys = jax.random.split(jax.random.fold_in(CLOSED_OVER, batch["step"]), L)
    return jnp.mean(llamem.apply_stack(dropout, w, batch["x"], keys, remat=on(how)) ** 2)


def keys_of_another_kind(w: Any, batch: Any, how: Any) -> Any:
    return jnp.mean(llamem.apply_stack(dropout, w, batch["x"], jax.random.split(batch["key"], L), remat=on(how)) ** 2)


@jax.custom_vjp
def smooth(x: Any) -> Any:
    return jnp.tanh(x)


def _smooth_forward(x: Any) -> Any:
    y = checkpoint_name(jnp.tanh(x), "res")
    return y, y


smooth.defvjp(_smooth_forward, lambda y, g: (g * (1 - y**2),))


def named_in_a_rule(w: Any, x: Any, remat: Any) -> Any:
    def body(w, x):
        return x + jnp.sin(smooth(x @ w["up"])) @ w["down"]

    return jnp.mean(llamem.apply_stack(body, w, x, remat=remat) ** 2)


class Block(linen.Module):
    """A block of flax linen with dropout, scanned and rematerialised by linen's own transforms."""

    @linen.compact
    def __call__(self, x: Any, _: None) -> tuple[Any, None]:
        h = jnp.sin(jnp.tanh(linen.Dense(4 * D)(linen.LayerNorm()(x))))
        return x + linen.Dropout(0.1, deterministic=False)(linen.Dense(D)(h)), None


def linen_stack(rematerialised: bool) -> linen.Module:
    block = linen.remat(Block, prevent_cse=False) if rematerialised else Block
    return linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=L)()


def linen_transforms(w: Any, batch: Any, how: Any) -> Any:
    x, _ = linen_stack(bool(how)).apply(w, batch["x"], None, rngs={"dropout": batch["key"]})
    return jnp.mean(x**2)


def denoising(w: Any, batch: Any, how: Any) -> Any:
    """A step of diffusion training: times and noise are drawn, the network sees a time embedding."""
    times_key, noise_key = jax.random.split(batch["key"])
    times = jax.random.uniform(times_key, (N, 1))
    noise = jax.random.normal(noise_key, (N, D))
    noisy = jnp.cos(times) * batch["x"] + jnp.sin(times) * noise

    def body(w, x):
        return layer(w, x + jnp.sin(times))

    return jnp.mean((llamem.apply_stack(body, w, noisy, remat=on(how)) - noise) ** 2)


MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def by_shards(w: Any, x: Any, how: Any) -> Any:
    """The whole loss under shard_map."""

    def local(w: Any, x: Any) -> Any:
        return jax.lax.pmean(scanned(jax.checkpoint(layer) if how else layer, w, x), "data")

    spec = jax.sharding.PartitionSpec
    return jax.shard_map(local, mesh=MESH, in_specs=(spec(), spec("data")), out_specs=spec(), check_vma=False)(w, x)


def mixed_precision(w: Any, x: Any, how: Any) -> Any:
    """Weights in float32, products in bfloat16."""

    def body(w, x):
        return layer(half(w), x)

    out = llamem.apply_stack(body, w, half(x), remat=on(how))
    return jnp.mean(out.astype(jnp.float32) ** 2)


def state_space(w: Any, x: Any, how: Any) -> Any:
    """A linear recurrence by associative scan."""

    def body(w: Any, x: Any) -> Any:
        decay = jax.nn.sigmoid(x @ w["gate"])

        def join(a, b):
            return (a[0] * b[0], a[1] * b[0] + b[1])

        return x + jax.lax.associative_scan(join, (decay, jnp.tanh(x @ w["in"])))[1]

    return jnp.mean(llamem.apply_stack(body, w, x.reshape(4, N // 4, D), remat=on(how)) ** 2)


def list_of_dicts(w: Any, batch: Any, how: Any) -> Any:
    """Weights as a list of dicts, stacked on the way in; the key folded with the layer's number."""
    keys = jax.vmap(lambda i: jax.random.fold_in(batch["key"], i))(jnp.arange(L))
    return jnp.mean(llamem.apply_stack(dropout, llamem.stack_layers(w), batch["x"], keys, remat=on(how)) ** 2)


def variational_autoencoder(w: Any, batch: Any, how: Any) -> Any:
    encoded = llamem.apply_stack(layer, w, batch["x"], remat=on(how))
    sample = encoded + jnp.exp(encoded / 4) * jax.random.normal(batch["key"], encoded.shape)
    decoded = llamem.apply_stack(layer, w, sample, remat=on(how))
    return jnp.mean((decoded - batch["x"]) ** 2) / 1e3, {"rate": jnp.mean(encoded**2)}


FRESH, STEP, VARIED = "random numbers are fresh", {"x": X, "step": jnp.int32(4)}, {"x": X, "key": KEYS[3]}
SAVE_H = Policy(save=("h",))
RNN = {"in": normal(0, D, 256), "out": normal(1, 256, 256)}
STYLES: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {
    "vision transformer with a bias of the keys": (vision_transformer, VIT, X, True, {}),
    "convolutions, batch normalisation": (residual_network, CONVOLUTIONS, jnp.tile(X, (1, 1)), True, {}),
    "encoder and decoder": (encoder_and_decoder, {"encoder": WEIGHTS, "decoder": half(WEIGHTS)}, X, True, {}),
    "nested, names": (nested, WEIGHTS, X, SAVE_H, {}),
    "nested, products": (nested, WEIGHTS, X, "dots_saveable", {}),
    "target network": (with_a_target, {"online": WEIGHTS, "target": jax.tree.map(jnp.copy, WEIGHTS)}, X, True, {}),
    "identity initialisation": (
        state_space,
        {"gate": jnp.tile(jnp.eye(D), (L, 1, 1)), "in": jnp.tile(jnp.eye(D), (L, 1, 1))},
        X,
        True,
        {},
    ),
    "variational dropout": (recurrent, RNN, VARIED, True, {"skip": {FRESH}}),
    "fixed random projection": (fixed_projection, WEIGHTS, X, True, {"skip": {FRESH}}),
    "a Python number": (with_a_number, {"scale": 0.5, "layers": WEIGHTS}, X, True, {}),
    "a key closed over, and the step": (closed_over_key, WEIGHTS, STEP, True, {}),
    "rbg keys": (keys_of_another_kind, WEIGHTS, {"x": X, "key": jax.random.key(3, impl="rbg")}, True, {}),
    "raw keys": (keys_of_another_kind, WEIGHTS, {"x": X, "key": jax.random.PRNGKey(3)}, True, {}),
    "a name in a custom rule": (named_in_a_rule, WEIGHTS, X, Policy(save=("res",)), {}),
    "linen's transforms": (linen_transforms, linen_stack(False).init(KEYS[2], X, None), BATCH, True, {}),
    "diffusion": (denoising, WEIGHTS, BATCH, True, {}),
    "shard_map": (by_shards, WEIGHTS, X, True, {}),
    "mixed precision": (mixed_precision, WEIGHTS, X, True, {}),
    "state space": (state_space, {"gate": normal(0, L, D, D), "in": normal(1, L, D, D)}, X, True, {}),
    "list of dicts": (list_of_dicts, llamem.unstack_layers(WEIGHTS), BATCH, True, {}),
    "variational autoencoder": (variational_autoencoder, WEIGHTS, BATCH, True, {}),
}
