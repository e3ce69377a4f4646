"""Wrong answers to the exercises of notebook 05: each is refused, with a hint that says what is wrong with it.

Each hint is checked for what it must lead to (a pattern) and for what it must not give away.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from llamem.course.exercises import vocabulary_tiling_on_a_mesh as mesh


def arriving(line, n, trips, *, shares=None, arrays=lambda found: found, bits=None):
    """The right answer, but for what arrives of a result, which arrays count, and their bits."""
    ((result, kind),) = re.findall(r" = (.*?) ([a-z-]+)\(", line)
    share = {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n} | (shares or {})
    found = arrays(re.findall(r"[a-z](\d+)\[([\d,]*)\]", result))
    sizes = [int(bits or own) // 8 * math.prod(int(size) for size in sizes.split(",") if size) for own, sizes in found]
    return trips * share[kind] * sum(sizes)


def by_its_name(line, n, trips):
    kind, *_ = re.findall("all.gather|reduce.scatter|psum|all.reduce", line)
    kind = kind.replace("_", "-").replace("psum", "all-reduce")
    return arriving(re.sub(r" [a-z-]+\(", f" {kind}(", line), n, trips)


def one_type(line, n, trips):
    (first, *_) = re.findall(r"[a-z](\d+)\[", line)
    return arriving(line, n, trips, bits=first)


def merged(m, s, mix, axis, *, scale=lambda m, top: jnp.exp(m - top), meet=lax.psum):
    top = lax.pmax(m, axis)
    factor = scale(m, top)
    s, mix = meet(s * factor, axis), meet(mix * factor[:, None], axis)
    return top + jnp.log(s), mix / s[:, None]


def gathered_and_merged(m, s, mix, axis):
    m, s, mix = (lax.all_gather(a, axis) for a in (m, s, mix))
    top = m.max(0)
    s, mix = (s * jnp.exp(m - top)).sum(0), (mix * jnp.exp(m - top)[..., None]).sum(0)
    return top + jnp.log(s), mix / s[:, None]


def mix_as_it_is(m, s, mix, axis):
    lse, _ = merged(m, s, mix, axis)
    return lse, lax.psum(mix, axis) / jnp.exp(lse - lax.pmax(m, axis))[:, None]


def mean_of_means(m, s, mix, axis):
    lse, _ = merged(m, s, mix, axis)
    return lse, lax.pmean(mix / s[:, None], axis)


def own_columns(dw, axis):
    width = dw.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(dw, lax.axis_index(axis) * width, width, 1)


def next_device(dw, axis):
    own = lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True)
    n = lax.axis_size(axis)
    return lax.ppermute(own, axis, [(i, (i + 1) % n) for i in range(n)])


def logit(x, w, ids, axis, *, shift=True, mask=True, meet=lax.psum):
    own = ids - lax.axis_index(axis) * len(w) if shift else ids
    here = (own >= 0) & (own < len(w))
    found = jnp.sum(x * w[jnp.clip(own, 0, len(w) - 1)], 1)
    return meet(jnp.where(here, found, 0) if mask else found, axis)


def unshifted_but_masked_by_the_right_device(x, w, ids, axis):
    here = ids // len(w) == lax.axis_index(axis)
    return lax.psum(jnp.where(here, jnp.sum(x * w[jnp.clip(ids, 0, len(w) - 1)], 1), 0), axis)


def with_the_head_gathered(x, w, ids, axis):
    return jnp.sum(x * lax.all_gather(w, axis, tiled=True)[ids], 1)


def stay(a, axis):
    return a


KINDS = ("all-gather", "reduce-scatter", "all-reduce")
WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    # A line of a compiled program.
    "the result's bytes": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, shares=dict.fromkeys(KINDS, 1)),
        "have already",
    ),
    "one share for all": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, shares=dict.fromkeys(KINDS, (n - 1) / n)),
        "added into it",
    ),
    "an all-reduce as a gather": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, shares={"all-reduce": (n - 1) / n}),
        "followed by another",
    ),
    "a scalar is nothing": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, arrays=lambda found: [row for row in found if row[1]]),
        "without sizes",
    ),
    "once": (mesh.check_bytes_that_arrive, lambda line, n, trips: arriving(line, n, 1), "body of a loop"),
    "the first of a tuple": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, arrays=lambda found: found[:1]),
        "How many arrays",
    ),
    "all in 32 bits": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, n, trips, bits=32),
        "bytes has one element",
    ),
    "always eight devices": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: arriving(line, 8, trips),
        "how many devices",
    ),
    "bits for bytes": (
        mesh.check_bytes_that_arrive,
        lambda line, n, trips: 8 * arriving(line, n, trips),
        "8.000 times",
    ),
    "what the name says": (mesh.check_bytes_that_arrive, by_its_name, "is a name"),
    "one type for a tuple": (mesh.check_bytes_that_arrive, one_type, "type of its own"),
    # The softmax over devices.
    "sums added as they are": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: merged(m, s, mix, axis, scale=lambda m, top: jnp.ones_like(m)),
        "maximum of its own",
    ),
    "the exponent the wrong way round": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: merged(m, s, mix, axis, scale=lambda m, top: jnp.exp(jnp.clip(top - m, 0, 80))),
        "maximum of its own",
    ),
    "only its own": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: (m + jnp.log(s), mix / s[:, None]),
        "with its own numbers",
    ),
    "summed nowhere": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: merged(m, s, mix, axis, meet=stay),
        "with its own numbers",
    ),
    "the mix as it is": (mesh.check_merge_devices, mix_as_it_is, "numerator"),
    "the mean of the means": (mesh.check_merge_devices, mean_of_means, "numerator"),
    "the denominator for logsumexp": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: (jnp.exp(merged(m, s, mix, axis)[0]), merged(m, s, mix, axis)[1]),
        "maximum of its own",
    ),
    "everything gathered": (mesh.check_merge_devices, gathered_and_merged, "right, but"),
    "logsumexp alone": (mesh.check_merge_devices, lambda *a: merged(*a)[0], "two arrays"),
    "both the other way round": (mesh.check_merge_devices, lambda *a: merged(*a)[::-1], "one number per token"),
    # The transpose of the gather.
    "the sum of all, whole": (mesh.check_transpose, lambda dw, axis: lax.psum(dw, axis), "Which part of the head"),
    "as it came": (mesh.check_transpose, lambda dw, axis: dw, "Which part of the head"),
    "its own columns of its own gradient": (mesh.check_transpose, own_columns, "Who else"),
    "a mean": (
        mesh.check_transpose,
        lambda dw, axis: lax.psum_scatter(dw, axis, scatter_dimension=1, tiled=True) / lax.axis_size(axis),
        "a mean over the devices",
    ),
    "summed whole, then cut": (
        mesh.check_transpose,
        lambda dw, axis: own_columns(lax.psum(dw, axis), axis),
        "thrown away",
    ),
    "the columns of a neighbour": (mesh.check_transpose, next_device, "not those of the columns"),
    "another gather": (
        mesh.check_transpose,
        lambda dw, axis: lax.all_gather(dw, axis, axis=1, tiled=True),
        "along its columns",
    ),
    "untiled": (
        mesh.check_transpose,
        lambda dw, axis: lax.psum_scatter(dw, axis, scatter_dimension=1),
        "along its columns",
    ),
    # The target's logit.
    "not summed": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, axis, meet=stay),
        "have not told each other",
    ),
    "neither masked nor summed": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, axis, mask=False, meet=stay),
        "different answers",
    ),
    "not masked": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, axis, mask=False),
        "do not hold the row",
    ),
    "a mean of all": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, axis, meet=lax.pmean),
        "do not hold the row",
    ),
    "ids not shifted": (
        mesh.check_target_logit,
        unshifted_but_masked_by_the_right_device,
        "In which row of its own",
    ),
    "all logits": (mesh.check_target_logit, lambda x, w, ids, axis: lax.psum(x @ w.T, axis), "one number per token"),
    "the head gathered": (mesh.check_target_logit, with_the_head_gathered, "right, but"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_about_a_mesh_is_refused_with_its_hint(name):
    check, answer, leads_to = WRONG[name]
    with pytest.raises(AssertionError, match=leads_to) as refused:
        check(answer)
    hint = str(refused.value)
    assert len(hint.split()) > 8, "the hint says too little"
    of_lines = check is mesh.check_bytes_that_arrive  # whose hints quote a line
    answers = ("n - 1", "/ n", "16 bits") if of_lines else ("psum", "pmax", "exp(", "axis_index", "scatter")
    assert not any(word in hint for word in answers), "the hint is the answer"


def ring(dw, axis):
    """The reduce-scatter, message by message: each device passes on what it has summed so far."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    columns = jnp.stack(jnp.split(dw, n, 1))
    total = columns[(me - 1) % n]
    for step in range(1, n):
        total = lax.ppermute(total, axis, [(i, (i + 1) % n) for i in range(n)])
        total = total + columns[(me - 1 - step) % n]
    return total


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (mesh.check_merge_devices, merged),
        (mesh.check_transpose, lambda dw, axis: lax.all_to_all(dw, axis, 1, 0, tiled=True).reshape(4, 12, 2).sum(0)),
        (mesh.check_transpose, ring),
        (mesh.check_target_logit, logit),
        (mesh.check_bytes_that_arrive, lambda line, n, trips: round(arriving(line, n, trips))),
    ],
)
def test_a_right_answer_about_a_mesh_in_other_words_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
