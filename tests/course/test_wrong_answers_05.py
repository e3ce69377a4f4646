"""Wrong answers to the exercises of notebook 05: each is refused, with a hint that says what is wrong with it.

Each hint is checked for what it must lead to (a pattern) and for what it must not give away.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from answers import Answers, refuse
from jax import lax

from llamem_course.exercises import vocabulary_tiling_on_a_mesh as mesh


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


def weighed_means(m, s, mix, axis):
    lse, _ = merged(m, s, mix, axis)
    return lse, lax.psum(mix / s[:, None] * (s * jnp.exp(m - lse))[:, None], axis)


def counted_from(m, s, mix, axis, *, top):
    s, mix = lax.psum((s * jnp.exp(m - top), mix * jnp.exp(m - top)[:, None]), axis)
    return top + jnp.log(s), mix / s[:, None]


def mean_of_finite(m, axis):
    finite = jnp.isfinite(m)
    return lax.psum(jnp.where(finite, m, 0), axis) / lax.psum(finite.astype(m.dtype), axis)


def over_the_sums_as_they_are(m, s, mix, axis):
    factor = jnp.exp(m - lax.pmax(m, axis))
    return merged(m, s, mix, axis)[0], lax.psum(mix * factor[:, None], axis) / lax.psum(s, axis)[:, None]


def round_the_ring(m, s, mix, axis):
    devices = lax.axis_size(axis)
    top, total, rows = m, s, mix
    for _ in range(devices - 1):
        m, s, mix = lax.ppermute((m, s, mix), axis, [(i, (i + 1) % devices) for i in range(devices)])
        new_top = jnp.maximum(top, m)
        before, added = jnp.exp(top - new_top), jnp.exp(m - new_top)
        total, rows = total * before + s * added, rows * before[:, None] + mix * added[:, None]
        top = new_top
    return top + jnp.log(total), rows / total[:, None]


def logsumexp_of_all_gathered(m, s, mix, axis):
    """Every device's logsumexp travels to every other: as few bytes as two numbers on four devices, not on eight."""
    lse = jax.nn.logsumexp(lax.all_gather(m + jnp.log(s), axis), axis=0)
    return lse, lax.psum(mix * jnp.exp(m - lse)[:, None], axis)


def added_in_shares(m, s, mix, axis, *, over):
    """Each device adds up its share of the tokens or of the columns, and passes it on."""

    def meet(a, axis):
        along = over if a.ndim > over else 0
        return lax.all_gather(
            lax.psum_scatter(a, axis, scatter_dimension=along, tiled=True), axis, axis=along, tiled=True
        )

    return merged(m, s, mix, axis, meet=meet)


def logit(x, w, ids, axis, *, shift=True, mask=True, meet=lax.psum):
    own = ids - lax.axis_index(axis) * len(w) if shift else ids
    here = (own >= 0) & (own < len(w))
    found = jnp.sum(x * w[jnp.clip(own, 0, len(w) - 1)], 1)
    return meet(jnp.where(here, found, 0) if mask else found, axis)


def shared_out(a, axis):
    return lax.all_gather(lax.psum_scatter(a, axis, tiled=True), axis, tiled=True)


def unshifted_but_masked_by_the_right_device(x, w, ids, axis):
    here = ids // len(w) == lax.axis_index(axis)
    return lax.psum(jnp.where(here, jnp.sum(x * w[jnp.clip(ids, 0, len(w) - 1)], 1), 0), axis)


def with_the_head_gathered(x, w, ids, axis):
    return jnp.sum(x * lax.all_gather(w, axis, tiled=True)[ids], 1)


def largest_with_nothing_elsewhere(x, w, ids, axis):
    own = ids - lax.axis_index(axis) * len(w)
    found = jnp.einsum("nd,nd->n", x, w[own % len(w)])
    return lax.pmax(jnp.where((own >= 0) & (own < len(w)), found, -jnp.inf), axis)


def held(x, w, ids, axis, *, here):
    own = ids - lax.axis_index(axis) * len(w)
    return lax.psum(jnp.where(here(own, len(w)), jnp.sum(x * w[jnp.clip(own, 0, len(w) - 1)], 1), 0), axis)


def row_summed(x, w, ids, axis):
    own = ids - lax.axis_index(axis) * len(w)
    here = (own >= 0) & (own < len(w))
    return jnp.sum(x * lax.psum(jnp.where(here[:, None], w[own % len(w)], 0), axis), 1)


def dealt_in_turns(x, w, ids, axis):
    devices = lax.axis_size(axis)
    here = ids % devices == lax.axis_index(axis)
    return lax.psum(jnp.where(here, jnp.sum(x * w[ids // devices], 1), 0), axis)


def stay(a, axis):
    return a


def all_its_own_logits(x, w, ids, axis):
    own = ids - lax.axis_index(axis) * len(w)
    found = jnp.take_along_axis(x @ w.T, jnp.clip(own, 0, len(w) - 1)[:, None], 1)[:, 0]
    return lax.psum(jnp.where((own >= 0) & (own < len(w)), found, 0), axis)


def row_by_a_product(x, w, ids, axis):
    chosen = (ids[:, None] - lax.axis_index(axis) * len(w) == jnp.arange(len(w))).astype(w.dtype)
    return lax.psum(jnp.sum(x * (chosen @ w), axis=1), axis)


def word_by_word(x, w, ids, axis):
    own = ids - lax.axis_index(axis) * len(w)

    def look(found, word):
        return found + jnp.where(own == word[0], x @ word[1], 0), None

    return lax.psum(lax.scan(look, jnp.zeros(len(x)), (jnp.arange(len(w)), w))[0], axis)


def word_by_word_in_an_open_loop(x, w, ids, axis):
    own = ids - lax.axis_index(axis) * len(w)

    def look(carry):
        word, found = carry
        return word + 1, found + jnp.where(own == word, x @ w[word], 0)

    _, found = lax.while_loop(lambda carry: carry[0] < len(w), look, (0, jnp.zeros(len(x))))
    return lax.psum(found, axis)


def mean(losses, counts, axis, *, meet=lax.psum, mask=True):
    total = jnp.sum(jnp.where(counts, losses, 0)) if mask else jnp.sum(losses)
    return meet(total, axis) / meet(jnp.sum(counts), axis)


def of_its_own(losses, counts, axis):
    return jnp.sum(losses * counts) / jnp.sum(counts)


WRONG: Answers = {
    # The mean over devices.
    "the mean of the devices' means": (
        mesh.check_mean_over_devices,
        lambda *a: lax.pmean(of_its_own(*a), a[2]),
        "has 0 / 0",
    ),
    "the mean of the means, without NaN": (
        mesh.check_mean_over_devices,
        lambda *a: lax.pmean(jnp.nan_to_num(of_its_own(*a)), a[2]),
        "mean of the devices' means",
    ),
    "a device's own mean": (mesh.check_mean_over_devices, of_its_own, "end with different numbers"),
    "the whole sum over its own count": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.psum(jnp.sum(losses * counts), axis) / jnp.sum(counts),
        "end with different numbers",
    ),
    "all tokens": (mesh.check_mean_over_devices, lambda *a: lax.pmean(a[0].mean(), a[2]), "which of them count"),
    "divided by all tokens": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.pmean(jnp.mean(losses * counts), axis),
        "divide by all tokens",
    ),
    "the sum": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.psum(jnp.sum(losses * counts), axis),
        "divided by what",
    ),
    "divided by the devices": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.pmean(jnp.sum(losses * counts), axis),
        "divide by the devices",
    ),
    "all losses over those that count": (
        mesh.check_mean_over_devices,
        partial(mean, mask=False),
        "which two numbers",
    ),
    "the count of eight devices": (
        mesh.check_mean_over_devices,
        lambda *a: mean(*a, meet=lambda x, axis: 8 * lax.pmean(x, axis)) * lax.axis_size(a[2]) / 8,
        "wrong on 2 with 3",
    ),
    "losses that do not count times 0": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.psum(jnp.sum(losses * counts), axis) / lax.psum(jnp.sum(counts), axis),
        "NaN times 0",
    ),
    "losses that do not count times 0, gathered": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.all_gather(losses @ counts, axis).sum() / lax.psum(counts.sum(), axis),
        "NaN times 0",
    ),
    "whatever is NaN left out": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: lax.psum(jnp.nansum(losses * counts), axis) / lax.psum(counts.sum(), axis),
        "a run that fails goes on unseen",
    ),
    "every token gathered": (
        mesh.check_mean_over_devices,
        lambda losses, counts, axis: jnp.mean(lax.all_gather(losses, axis), where=lax.all_gather(counts, axis)),
        "Two numbers say all",
    ),
    "a number for each token": (mesh.check_mean_over_devices, lambda losses, counts, axis: losses, "return one number"),
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
    "the mean of the means": (mesh.check_merge_devices, mean_of_means, "that of the devices' means"),
    "the denominator for logsumexp": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: (jnp.exp(merged(m, s, mix, axis)[0]), merged(m, s, mix, axis)[1]),
        "maximum of its own",
    ),
    "no maximum at all": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: counted_from(m, s, mix, axis, top=jnp.zeros_like(m)),
        "maximum of its own",
    ),
    "the mean of the maxima": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: counted_from(m, s, mix, axis, top=lax.pmean(m, axis)),
        "maximum of its own",
    ),
    "the mean of the maxima that are finite": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: counted_from(m, s, mix, axis, top=mean_of_finite(m, axis)),
        "maximum of its own",
    ),
    "the first device's maximum": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: counted_from(m, s, mix, axis, top=lax.all_gather(m, axis)[0]),
        "maximum of its own",
    ),
    "a maximum of at least 0": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: counted_from(m, s, mix, axis, top=jnp.maximum(lax.pmax(m, axis), 0)),
        "maximum of its own",
    ),
    "0 for a masked maximum": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: merged(jnp.where(jnp.isinf(m), 0, m), s, mix, axis),
        "in place of -inf",
    ),
    "the maximum forgotten at the end": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: (merged(m, s, mix, axis)[0] - lax.pmax(m, axis), merged(m, s, mix, axis)[1]),
        "does the sum of all count",
    ),
    "the mix over sums as they are": (mesh.check_merge_devices, over_the_sums_as_they_are, "quotient"),
    "the mix not divided": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: (
            merged(m, s, mix, axis)[0],
            lax.psum(mix * jnp.exp(m - lax.pmax(m, axis))[:, None], axis),
        ),
        "quotient",
    ),
    "pairs that go round the ring": (mesh.check_merge_devices, round_the_ring, "nor sent twice"),
    "a device's own mean, weighed": (mesh.check_merge_devices, weighed_means, "0 / 0"),
    "everything gathered": (mesh.check_merge_devices, gathered_and_merged, "right, but"),
    "logsumexps gathered, rows added": (mesh.check_merge_devices, logsumexp_of_all_gathered, "not be collected first"),
    "eight devices, however many there are": (
        mesh.check_merge_devices,
        lambda *a: merged(*a, meet=lambda a, axis: 8 * lax.pmean(a, axis)),
        "wrong on 2",
    ),
    "the axis of the notebook, whatever is given": (
        mesh.check_merge_devices,
        lambda m, s, mix, axis: merged(m, s, mix, "tensor"),
        "name is the last argument",
    ),
    "the notebook's axis for the logit": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, "tensor"),
        "name is the last argument",
    ),
    "logsumexp alone": (mesh.check_merge_devices, lambda *a: merged(*a)[0], "two arrays"),
    "both the other way round": (mesh.check_merge_devices, lambda *a: merged(*a)[::-1], "one number per token"),
    # The target's logit.
    "the largest of all": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: logit(x, w, ids, axis, meet=lax.pmax),
        "negative logits",
    ),
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
    "all logits of its own words": (mesh.check_target_logit, all_its_own_logits, "one for every token"),
    "its row by a product": (mesh.check_target_logit, row_by_a_product, "one for every token"),
    "its own words one by one": (mesh.check_target_logit, word_by_word, "one for every token"),
    "its own words in an open loop": (mesh.check_target_logit, word_by_word_in_an_open_loop, "how often it runs"),
    "five rows, whatever the head": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: lax.psum(
            jnp.where(ids // 5 == lax.axis_index(axis), jnp.sum(x * w[ids % 5], 1), 0), axis
        ),
        "wrong already",
    ),
    "one row too low": (mesh.check_target_logit, lambda x, w, ids, axis: logit(x, w, ids - 1, axis), "wrong already"),
    "nothing": (mesh.check_target_logit, lambda x, w, ids, axis: 0.0 * ids, "wrong already"),
    "no upper end to its rows": (
        mesh.check_target_logit,
        partial(held, here=lambda own, rows: own >= 0),
        "that it has no such row",
    ),
    "no lower end to its rows": (
        mesh.check_target_logit,
        partial(held, here=lambda own, rows: own < rows),
        "still reads some row",
    ),
    "one row too many": (
        mesh.check_target_logit,
        partial(held, here=lambda own, rows: (own >= 0) & (own <= rows)),
        "that it has no such row",
    ),
    "words dealt in turns": (mesh.check_target_logit, dealt_in_turns, "still reads some row"),
    "the row summed, then the product": (mesh.check_target_logit, row_summed, "one number per token"),
    "summed twice": (
        mesh.check_target_logit,
        lambda x, w, ids, axis: lax.pmean(logit(x, w, ids, axis), axis),
        "one number per token",
    ),
    "the head gathered": (mesh.check_target_logit, with_the_head_gathered, "right, but"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_about_a_mesh_is_refused_with_its_hint(name):
    refuse(WRONG[name], "psum", "pmax", "exp(", "axis_index")


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (mesh.check_mean_over_devices, mean),
        (mesh.check_mean_over_devices, partial(mean, meet=lax.pmean)),
        (
            mesh.check_mean_over_devices,
            lambda losses, counts, axis: (
                lax.all_gather(losses.sum(where=counts), axis).sum() / lax.psum(counts.sum(), axis)
            ),
        ),
        (mesh.check_merge_devices, merged),
        (mesh.check_merge_devices, lambda *a: list(merged(*a))),
        (mesh.check_merge_devices, partial(added_in_shares, over=0)),
        (mesh.check_merge_devices, partial(added_in_shares, over=1)),
        (mesh.check_target_logit, logit),
        (mesh.check_target_logit, largest_with_nothing_elsewhere),
        (mesh.check_target_logit, partial(logit, meet=shared_out)),
    ],
)
def test_a_right_answer_about_a_mesh_in_other_words_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
