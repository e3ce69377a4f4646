"""Cross-entropy written apart from the package, in float64: every option, and the gradients link by link."""

from typing import Any

import numpy as np

N, D, V = 53, 16, 300  # no tile size divides N or V; V makes three tiles of 128 rows
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(N, D))
HEAD = RNG.normal(size=(V, D))
TARGETS = RNG.integers(0, V, N)
TARGETS[[3, 17, 18, 52]] = -100
WEIGHTS = RNG.uniform(0.2, 2, N)
WEIGHTS[7] = 0
COTANGENT = RNG.normal(size=N)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"logit_softcap": 5.0},
    "scale": {"logit_scale": 0.7},
    "all": {"z_loss": 0.01, "logit_softcap": 5.0, "logit_scale": 0.7},
}


def reference(hidden, head, targets, cotangent, z_loss=0.0, logit_softcap=None, logit_scale=1.0):
    """Loss per token in float64, and the gradients of `sum(cotangent * loss)` by the chain rule, link by link."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    raw = hidden @ head.T * logit_scale
    z = raw if logit_softcap is None else logit_softcap * np.tanh(raw / logit_softcap)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    wanted = np.zeros_like(z)
    wanted[np.arange(len(z)), np.where(targets < 0, 0, targets)] = 1
    counts = np.where(targets < 0, 0.0, 1.0)
    loss = (lse - (wanted * z).sum(1) + z_loss * lse**2) * counts
    dz = (p - wanted + 2 * z_loss * lse[:, None] * p) * (cotangent * counts)[:, None]
    draw = dz if logit_softcap is None else dz / np.cosh(raw / logit_softcap) ** 2
    draw = draw * logit_scale
    return loss, (draw @ head, draw.T @ hidden)
