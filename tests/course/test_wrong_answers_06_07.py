"""Answers that a reader may well give to the exercises of notebooks 06 and 07, and that are wrong: each is rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamem import TrainSettings
from llamem.course.exercises import llama3, train_llama3


def parameters(D, V, L, H, K, h, F, tables=2, heads=None, kv=None, feed_forward=3, norms=2, last=1):
    heads, kv = (H * h if heads is None else heads), (K * h if kv is None else kv)
    return tables * V * D + L * (2 * D * heads + 2 * D * kv + feed_forward * D * F + norms * D) + last * D


def cosine(step, peak, warmup, steps, end=0.1):
    done = (step - warmup) / (steps - warmup)
    return peak * (end + (1 - end) * (1 + np.cos(np.pi * done)) / 2)


def schedule(warm, end=0.1, decay=cosine):
    def rate(step, peak, warmup, steps):
        return warm(step, peak, warmup) if step < warmup else decay(step, peak, warmup, steps, end)

    return rate


def right_warmup(step, peak, warmup):
    return peak / warmup + (peak - peak / warmup) * step / warmup


def nucleus(probabilities, p, strict=False, one_less=False, by_likelihood=False):
    kept, total = [], 0.0
    for i in np.argsort(probabilities)[::-1]:
        if one_less and total + probabilities[i] > p:
            break
        kept.append(int(i))
        total += probabilities[i]
        if total > p if strict else total >= p:
            break
    return kept if by_likelihood else sorted(kept)


WRONG: dict[str, tuple[Callable[..., None], Callable[..., Any], str]] = {
    "one table": (llama3.check_count_parameters, lambda *a: parameters(*a, tables=1), "untied"),
    "no norms": (llama3.check_count_parameters, lambda *a: parameters(*a, norms=0, last=0), "scale"),
    "no last norm": (llama3.check_count_parameters, lambda *a: parameters(*a, last=0), "scale"),
    "h is D / H": (
        llama3.check_count_parameters,
        lambda D, V, L, H, K, h, F: parameters(D, V, L, H, K, D // H, F),
        "Where does h belong",
    ),
    "keys as wide as queries": (
        llama3.check_count_parameters,
        lambda D, V, L, H, K, h, F: parameters(D, V, L, H, H, h, F),
        "missing or double",
    ),
    "two feed-forward matrices": (
        llama3.check_count_parameters,
        lambda *a: parameters(*a, feed_forward=2),
        "missing or double",
    ),
    "keys alone": (llama3.check_sequences_that_fit, lambda f, S, L, K, h, s: f // (L * S * K * h * s), "Twice"),
    "part of a cache": (llama3.check_sequences_that_fit, lambda f, S, L, K, h, s: f / (2 * L * S * K * h * s), "half"),
    "rounded up": (llama3.check_sequences_that_fit, lambda f, S, L, K, h, s: -(-f // (2 * L * S * K * h * s)), "half"),
    "no layers": (llama3.check_sequences_that_fit, lambda f, S, L, K, h, s: f // (2 * S * K * h * s), "hold"),
    "no heads": (llama3.check_sequences_that_fit, lambda f, S, L, K, h, s: f // (2 * L * S * h * s), "hold"),
    "by likelihood": (llama3.check_nucleus, lambda q, p: nucleus(q, p, by_likelihood=True), "smallest first"),
    "stops short": (llama3.check_nucleus, lambda q, p: nucleus(q, p, one_less=True), "do not reach"),
    "those above p": (llama3.check_nucleus, lambda q, p: [i for i, x in enumerate(q) if x >= p], "do not reach"),
    "everything": (llama3.check_nucleus, lambda q, p: list(range(len(q))), "suffice"),
    "probabilities": (llama3.check_nucleus, lambda q, p: [q[i] for i in nucleus(q, p)], "suffice"),
    "no gradients": (train_llama3.check_standing_bytes, lambda c, p, m: c.n_params * (p + 2 * m), "has a gradient"),
    "weights alone": (train_llama3.check_standing_bytes, lambda c, p, m: c.n_params * p, "weights alone"),
    "one moment": (train_llama3.check_standing_bytes, lambda c, p, m: c.n_params * (2 * p + m), "two moments"),
    "moments like weights": (train_llama3.check_standing_bytes, lambda c, p, m: c.n_params * 4 * p, "another type"),
    "from zero": (train_llama3.check_rate, schedule(lambda step, peak, warmup: peak * step / warmup), "foot"),
    "one step early": (train_llama3.check_rate, schedule(lambda s, peak, w: peak * (s + 1) / w), "straight line"),
    "down to zero": (train_llama3.check_rate, schedule(right_warmup, end=0.0), "cosine"),
    "a straight decay": (
        train_llama3.check_rate,
        schedule(right_warmup, decay=lambda s, p, w, n, e: p * (1 - 0.9 * (s - w) / (n - w))),
        "half a cosine",
    ),
    "a cosine from step 0": (
        train_llama3.check_rate,
        schedule(right_warmup, decay=lambda s, p, w, n, e: cosine(s, p, 0, n)),
        "ends at the peak",
    ),
    "no settings": (train_llama3.check_settings, lambda: 65_536, "TrainSettings"),
    "one long sequence": (train_llama3.check_settings, lambda: TrainSettings(seq_len=65_536, batch_size=1), "8,192"),
    "too few tokens": (train_llama3.check_settings, lambda: TrainSettings(seq_len=8192, batch_size=4), "65,536"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected_with_a_hint_that_leads(name):
    check, answer, hint = WRONG[name]
    with pytest.raises(AssertionError, match=hint):
        check(answer)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_all_sequences_at_once_do_not_fit():
    with pytest.raises(AssertionError, match="alive at once"):
        train_llama3.check_settings(lambda: TrainSettings(seq_len=8192, batch_size=8))
