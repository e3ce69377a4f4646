"""Llama written out a second time, plainly, in whatever precision its inputs have: what the package must equal."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def float64():
    """Float64 in JAX, under the names that every supported version has."""
    before = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def attention(q, k, v, positions):
    """Loops over heads; queries `[B, T, H, h]` at `positions` `[T]` see keys `[B, S, K, h]` at 0..position."""
    heads = []
    for head in range(q.shape[2]):
        kv = head // (q.shape[2] // k.shape[2])
        scores = jnp.einsum("bth,bsh->bts", q[:, :, head], k[:, :, kv]) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.arange(k.shape[1])[None, :] > positions[:, None], -1e30, scores)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        heads.append(jnp.einsum("bts,bsh->bth", weights / weights.sum(-1, keepdims=True), v[:, :, kv]))
    return jnp.stack(heads, axis=2)


def rope_frequencies(config):
    frequencies = []
    for i in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        if config.rope_scaling is not None:
            s = config.rope_scaling
            wavelength = 2 * math.pi / frequency
            if wavelength > s.original_max_seq_len / s.low_freq_factor:
                frequency /= s.factor
            elif wavelength > s.original_max_seq_len / s.high_freq_factor:
                smooth = (s.original_max_seq_len / wavelength - s.low_freq_factor) / (
                    s.high_freq_factor - s.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def _rotate(x, angles):
    pairs = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]  # RoPE turns complex numbers
    turned = pairs * np.exp(1j * angles)[:, None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def swiglu(y, w_gate, w_up, w_down):
    gate = y @ w_gate
    return (gate / (1 + jnp.exp(-gate)) * (y @ w_up)) @ w_down


def logits(config, params, tokens):
    """`params`: the arrays of `llamem.Llama`, by attribute name."""
    x = params["embedding"][tokens]
    angles = np.arange(tokens.shape[1])[:, None] * rope_frequencies(config)
    for i in range(config.n_layers):
        p = {name: leaf[i] for name, leaf in params["blocks"].items()}
        y = _norm(x, p["attn_norm"], config.norm_eps)
        q, k, v = (jnp.tensordot(y, p[name], 1) for name in ("wq", "wk", "wv"))
        if config.qk_norm:
            q, k = _norm(q, p["q_norm"], config.norm_eps), _norm(k, p["k_norm"], config.norm_eps)
        out = attention(_rotate(q, angles), _rotate(k, angles), v, np.arange(tokens.shape[1]))
        x = x + jnp.tensordot(out, p["wo"], 2)
        y = _norm(x, p["mlp_norm"], config.norm_eps)
        x = x + swiglu(y, p["w_gate"], p["w_up"], p["w_down"])
    head = params["embedding"] if config.tied_head else params["untied_head"]
    return _norm(x, params["norm"], config.norm_eps) @ head.T


def loss(config, params, tokens, targets, weights=None):
    """Cross-entropy, its mean weighted where weights are given."""
    z = logits(config, params, tokens)
    nll = jax.scipy.special.logsumexp(z, -1) - jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
    return nll.mean() if weights is None else (nll * weights).sum() / weights.sum()
