"""Policy gradients written apart from the package, in float64: the derivatives of each objective by hand."""

import numpy as np

B, T, D, V = 4, 13, 16, 300  # 52 tokens: no tile divides them, nor V
RNG = np.random.default_rng(1)
HIDDEN, HEAD = RNG.normal(size=(B, T, D)), RNG.normal(size=(V, D)) / 2
TARGETS = RNG.integers(0, V, (B, T))
MASK = (RNG.uniform(size=(B, T)) < 0.7).astype(float)
MASK[2] = 0  # a sequence without a token
MASK[1, 5:] = 0
ADVANTAGES = RNG.normal(size=(B, T))


def log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max(-1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))


def logprobs(hidden, head, targets=TARGETS, temperature=1.0, softcap=None):
    z = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    return np.take_along_axis(log_softmax(z), targets[..., None], -1)[..., 0]


OLD = logprobs(HIDDEN, HEAD) + 0.3 * RNG.normal(size=(B, T))
REF = logprobs(HIDDEN, HEAD) + 0.5 * RNG.normal(size=(B, T))


def of_token(logp, entropy, adv, old, ref, kind, clip_low, clip_high, kl_weight, entropy_weight):
    """A token's loss, and its derivatives for log-probability and entropy."""
    ratio = np.exp(logp - (logp if old is None else old))
    if kind == "reinforce":
        loss, g = -adv * logp, -adv
    elif kind == "importance":
        loss, g = -adv * ratio, -adv * ratio
    else:
        clipped = np.clip(ratio, 1 - clip_low, 1 + clip_high)
        free = ratio * adv <= clipped * adv
        loss, g = -np.minimum(ratio * adv, clipped * adv), np.where(free, -adv * ratio, 0)
    if kl_weight:
        r = ref - logp
        loss, g = loss + kl_weight * (np.exp(r) - r - 1), g + kl_weight * (1 - np.exp(r))
    return loss - entropy_weight * entropy, g, -entropy_weight


def reference(
    hidden, head, *, adv=ADVANTAGES, old=OLD, ref=None, mask=MASK, kind="clip", clip_low=0.2, clip_high=0.2,
    kl_weight=0.0, entropy_weight=0.0, normalize="tokens", normalizer=None, temperature=1.0, softcap=None,
) -> tuple[float, tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """The loss, and its gradients for hidden and head."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    raw = hidden @ head.T / temperature
    z = raw if softcap is None else softcap * np.tanh(raw / softcap)
    logp_all = log_softmax(z)
    p = np.exp(logp_all)
    entropy = -(p * logp_all).sum(-1)
    logp = np.take_along_axis(logp_all, TARGETS[..., None], -1)[..., 0]
    loss, g, h = of_token(logp, entropy, adv, old, ref, kind, clip_low, clip_high, kl_weight, entropy_weight)
    if normalize == "sequences":
        w = mask / np.maximum(mask.sum(-1, keepdims=True), 1) / (len(mask) if normalizer is None else normalizer)
    else:
        w = mask / (mask.sum() if normalizer is None else normalizer)
    onehot = np.eye(head.shape[0])[TARGETS]
    dz = (w * g)[..., None] * (onehot - p) - (w * h)[..., None] * p * (logp_all + entropy[..., None])
    draw = dz / temperature * (1 if softcap is None else 1 - (z / softcap) ** 2)
    grads = draw @ head, np.einsum("btv,btd->vd", draw, hidden)
    return float((w * loss).sum()), grads
