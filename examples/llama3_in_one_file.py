"""Llama 3 trained in one file: scan over layers, rematerialisation, a tiled loss, AdamW. Copy it and change it.

    python examples/llama3_in_one_file.py --steps 200

It needs jax, flax and optax, and reads Python's own standard library, byte by byte. Two things keep its memory small:

- `jax.checkpoint` around the body of one `lax.scan` over layers whose weights are stacked: of each layer only what
  entered it is kept for the backward pass; the rest is computed again there.
- The loss never holds the logits of all tokens. It goes over tiles of tokens, and makes the gradients in the same loop,
  as long as a tile's logits are there (`tiled_cross_entropy`).

Shapes stand in names: B batch, T sequence, N = B * T tokens, D model, V vocabulary, L layers, H heads, K key and value
heads, h channels of a head, F feed-forward.
"""

import argparse
import math
import sysconfig
import time
from functools import partial
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class Config:
    """Sizes of the model. Those of Llama 3.2 1B: 128,256, 2048, 16, 32, 8, 64, 8192."""

    vocab_size: int = 256
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 16
    d_ff: int = 384
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    num_tiles: int = 8  # of the loss
    compute_dtype: jnp.dtype = jnp.float32  # jnp.bfloat16 on accelerators


@flax.struct.dataclass
class TrainState:
    """What a step changes."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def init_params(config, key):
    """Weights in f32, those of all layers stacked: `[L, ...]`. Outputs of every product begin with variance one."""
    c, keys = config, iter(jax.random.split(key, 9))

    def normal(*shape, fan_in, scale=1.0):
        return scale * fan_in**-0.5 * jax.random.normal(next(keys), shape)

    L, D, H, K, h, F = c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff
    into_stream = 0.1 / math.sqrt(2 * L)  # so that the stream's variance does not grow with depth
    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (c.vocab_size, D)),
        "blocks": {
            "attn_norm": jnp.ones((L, D)),
            "wq": normal(L, D, H, h, fan_in=D),
            "wk": normal(L, D, K, h, fan_in=D),
            "wv": normal(L, D, K, h, fan_in=D),
            "wo": normal(L, H, h, D, fan_in=H * h, scale=into_stream),
            "mlp_norm": jnp.ones((L, D)),
            "w_gate": normal(L, D, F, fan_in=D),
            "w_up": normal(L, D, F, fan_in=D),
            "w_down": normal(L, F, D, fan_in=F, scale=into_stream),
        },
        "norm": jnp.ones(D),
        "untied_head": 0.02 * jax.random.normal(next(keys), (c.vocab_size, D)),
    }


def rms_norm(x, scale, eps):
    """`x / rms(x) * scale` over the last axis, in f32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(x.dtype)


def rotate(x_BTNh, theta):
    """RoPE: channels i and i + h/2 of each head turn by an angle that grows with the position."""
    T, half = x_BTNh.shape[1], x_BTNh.shape[-1] // 2
    angles = jnp.arange(T)[:, None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x_BTNh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNh.dtype)


def layer(config, params, x_BTD):
    """One layer: attention and a SwiGLU, each added to the stream."""
    c, w = config, jax.tree.map(lambda a: a.astype(config.compute_dtype), params)
    y_BTD = rms_norm(x_BTD, params["attn_norm"], c.norm_eps)
    q_BTHh = rotate(jnp.einsum("BTD,DHh->BTHh", y_BTD, w["wq"]), c.rope_theta)
    k_BTKh = rotate(jnp.einsum("BTD,DKh->BTKh", y_BTD, w["wk"]), c.rope_theta)
    v_BTKh = jnp.einsum("BTD,DKh->BTKh", y_BTD, w["wv"])
    attn_BTHh = jax.nn.dot_product_attention(q_BTHh, k_BTKh, v_BTKh, is_causal=True)
    x_BTD = x_BTD + jnp.einsum("BTHh,HhD->BTD", attn_BTHh, w["wo"])
    y_BTD = rms_norm(x_BTD, params["mlp_norm"], c.norm_eps)
    return x_BTD + (jax.nn.silu(y_BTD @ w["w_gate"]) * (y_BTD @ w["w_up"])) @ w["w_down"]


def hidden_states(config, params, tokens_BT):
    """Return the last layer's output, normed, `[B, T, D]`."""
    x_BTD = params["embedding"].astype(config.compute_dtype)[tokens_BT]
    body = jax.checkpoint(partial(layer, config))
    x_BTD, _ = jax.lax.scan(lambda x_BTD, weights: (body(weights, x_BTD), None), x_BTD, params["blocks"])
    return rms_norm(x_BTD, params["norm"], config.norm_eps)


def tile_loss(x_ND, head_VD, targets_N):
    """Return the summed cross-entropy of a tile of tokens; those with a target below 0 do not count."""
    logits_NV = jnp.einsum("ND,VD->NV", x_ND, head_VD, preferred_element_type=jnp.float32)
    target_N = jnp.take_along_axis(logits_NV, jnp.maximum(targets_N, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(targets_N >= 0, jax.nn.logsumexp(logits_NV, axis=1) - target_N, 0))


def cut(array, num_tiles, fill):
    """`[N, ...]` as `[tiles, N / tiles, ...]`, the last tile filled up."""
    rows = -(-array.shape[0] // num_tiles)
    widths = [(0, num_tiles * rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=fill).reshape(num_tiles, rows, *array.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def tiled_cross_entropy(x_ND, head_VD, targets_N, num_tiles):
    """Return the mean cross-entropy of `x_ND @ head_VD.T`: one tile's logits exist at a time."""

    def step(total, tile):
        return total + tile_loss(tile[0], head_VD, tile[1]), None

    tiles = cut(x_ND, num_tiles, 0), cut(targets_N, num_tiles, -1)
    return jax.lax.scan(step, jnp.zeros(()), tiles)[0] / jnp.maximum(jnp.sum(targets_N >= 0), 1)


def tiled_forward(x_ND, head_VD, targets_N, num_tiles):
    """Return the loss with both gradients: they are made here, so that no logits are computed a second time."""
    count = jnp.maximum(jnp.sum(targets_N >= 0), 1)

    def step(carry, tile):
        total, d_head_VD = carry  # grown in f32, whatever the weights' type
        value, (dx_ND, d_part_VD) = jax.value_and_grad(tile_loss, (0, 1))(tile[0], head_VD, tile[1])
        return (total + value, d_head_VD + d_part_VD.astype(jnp.float32)), dx_ND

    tiles = cut(x_ND, num_tiles, 0), cut(targets_N, num_tiles, -1)
    start = jnp.zeros(()), jnp.zeros(head_VD.shape, jnp.float32)
    (total, d_head_VD), dx = jax.lax.scan(step, start, tiles)
    dx_ND = dx.reshape(-1, x_ND.shape[1])[: x_ND.shape[0]]
    return total / count, (dx_ND, d_head_VD.astype(head_VD.dtype), count)


def tiled_backward(num_tiles, residuals, d_loss):
    """Only the scale is left to do."""
    dx_ND, d_head_VD, count = residuals
    scale = d_loss / count
    return (scale * dx_ND).astype(dx_ND.dtype), (scale * d_head_VD).astype(d_head_VD.dtype), None


tiled_cross_entropy.defvjp(tiled_forward, tiled_backward)


def loss_fn(config, params, inputs_BT, targets_BT):
    """Return the mean cross-entropy of a batch, in nats."""
    x_BTD = hidden_states(config, params, inputs_BT)
    head_VD = params["untied_head"].astype(config.compute_dtype)
    return tiled_cross_entropy(x_BTD.reshape(-1, config.d_model), head_VD, targets_BT.reshape(-1), config.num_tiles)


def make_optimizer(learning_rate, steps):
    """AdamW under warm-up and cosine decay; norms do not decay."""
    warmup = min(20, steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps, learning_rate / 10)

    def decays(params):
        return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(config, optimizer, state, tokens_BT):
    """One update. The state is donated: its memory is used again for the new one."""
    grad = jax.value_and_grad(lambda params: loss_fn(config, params, tokens_BT[:, :-1], tokens_BT[:, 1:]))
    loss, grads = grad(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), loss


def read_text():
    """Python's standard library as bytes: the last twentieth is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens_N = jnp.frombuffer(b"\n".join(file.read_bytes() for file in files), jnp.uint8).astype(jnp.int32)
    held_out = len(tokens_N) // 20
    return tokens_N[:-held_out], tokens_N[-held_out:]


def batch_of(tokens_N, batch_size, seq_len, key):
    """Random windows of one token more than a sequence."""
    starts_B = jax.random.randint(key, (batch_size, 1), 0, len(tokens_N) - seq_len)
    return tokens_N[starts_B + jnp.arange(seq_len + 1)]


def main():
    """Train, and say what became of the held-out text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    config, (train_N, held_out_N) = Config(), read_text()
    optimizer = make_optimizer(options.learning_rate, options.steps)
    params = init_params(config, jax.random.key(0))
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    held_out_BT = batch_of(held_out_N, 32, options.seq_len, jax.random.key(1))
    evaluate = jax.jit(partial(loss_fn, config))
    start = time.perf_counter()
    for step in range(options.steps):
        tokens_BT = batch_of(train_N, options.batch_size, options.seq_len, jax.random.fold_in(jax.random.key(2), step))
        state, loss = train_step(config, optimizer, state, tokens_BT)
        if step % 20 == 19 or step + 1 == options.steps:
            held_out = evaluate(state.params, held_out_BT[:, :-1], held_out_BT[:, 1:])
            seconds = time.perf_counter() - start
            print(f"step {step + 1:5}  loss {loss:.3f}  held out {held_out:.3f} nats a byte  {seconds:.0f} s")


if __name__ == "__main__":
    main()
