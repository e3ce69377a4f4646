"""Wrong answers to the exercises of notebook 03: each is refused, with a hint that says what is wrong with it.

Each hint is checked for what it must lead to (a pattern) and for what it must not give away.
"""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import Answers, refuse

from llamem import apply_stack
from llamem_course.exercises import scan_vs_unrolled as stacks


def loop(layer, w, x):
    for i in range(len(w["up"])):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x)
    return x


def scan(layer, w, x, **options):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, **options)[0]


def everything(layer):
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)


def dropout(layer, w, x, keys, remat=jax.checkpoint):
    return jax.lax.scan(lambda x, wk: (remat(layer)(wk[0], x, wk[1]), None), x, (w, keys))[0]


def loop_with_keys(layer, w, x, keys):
    for i, key in enumerate(keys):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x, key)
    return x


def split(key, w):
    return jax.random.split(key, len(w["up"]))


def divisors(n):
    return [g for g in range(1, n + 1) if n % g == 0]


def list_loop(layer, layers, x):
    for w in layers:
        x = layer(w, x)
    return x


def shapes(w):
    return jax.tree.map(jnp.shape, w)


def by_shape(layers):
    return sorted(layers, key=lambda w: str(shapes(w)))


def runs(layer, layers, x, remat=jax.checkpoint, key=shapes, stack=scan, **options):
    for _, run in itertools.groupby(layers, key=key):
        x = stack(remat(layer), jax.tree.map(lambda *leaves: jnp.stack(leaves), *run), x, **options)
    return x


def runs_but_alone(layer, layers, x):
    """Runs as asked, but a layer alone is applied as it is."""
    for _, run in itertools.groupby(layers, key=shapes):
        run = list(run)
        x = layer(run[0], x) if len(run) == 1 else runs(layer, run, x)
    return x


def runs_by_hand(layer, layers, x):
    """Find the runs by recursion, apply a layer alone without a scan, and loop by an index."""
    if not layers:
        return x
    n = next((i for i, w in enumerate(layers) if shapes(w) != shapes(layers[0])), len(layers))
    w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[:n])
    turn = lambda i, x: jax.checkpoint(layer)(jax.tree.map(lambda leaf: leaf[i], w), x)  # noqa: E731
    x = jax.checkpoint(layer)(layers[0], x) if n == 1 else jax.lax.fori_loop(0, n, turn, x)
    return runs_by_hand(layer, layers[n:], x)


def line(room, layer, held_8, held_16, *, copies=2, start=True):
    """Layers that fit, by a straight line: with weights and gradients, and with what is there without layers."""
    slope = (held_16 - held_8) / 8
    return int((room - start * (held_8 - 8 * slope)) // (copies * layer + slope))


STACKS: Answers = {
    # The layers that fit.
    "no gradients": (stacks.check_layers_that_fit, partial(line, copies=1), "gradient found its room"),
    "no beginning": (stacks.check_layers_that_fit, partial(line, start=False), "no layers at all"),
    "temporaries that do not grow": (
        stacks.check_layers_that_fit,
        lambda room, layer, a, b: int((room - (a - (b - a))) // (2 * layer)),
        "adds something to the temporaries",
    ),
    "temporaries alone": (
        stacks.check_layers_that_fit,
        partial(line, copies=0),
        "weights and their gradient found their room",
    ),
    "a sixteenth of the deep one for each": (
        stacks.check_layers_that_fit,
        lambda room, layer, a, b: room // (2 * layer + b // 16),
        "from a beginning",
    ),
    "beside eight layers": (
        stacks.check_layers_that_fit,
        lambda room, layer, a, b: int((room - a) // (2 * layer + (b - a) / 8)),
        "hold 8 inputs as well",
    ),
    "sixteen layers between the two": (
        stacks.check_layers_that_fit,
        lambda room, layer, a, b: int((room - (2 * a - b)) // (2 * layer + (b - a) / 16)),
        "which bytes does one more layer add",
    ),
    "a part of a layer": (
        stacks.check_layers_that_fit,
        lambda room, layer, a, b: (room - (2 * a - b)) / (2 * layer + (b - a) / 8),
        "not a whole number",
    ),
    "one too many": (stacks.check_layers_that_fit, lambda *a: line(*a) + 1, "does not fit whole"),
    "one layer kept back": (stacks.check_layers_that_fit, lambda *a: line(*a) - 1, "would still fit"),
    "a word": (stacks.check_layers_that_fit, lambda *a: "many", "not a number of layers"),
    # The runs.
    "a Python loop": (stacks.check_scan_runs, lambda layer, ws, x: list_loop(jax.checkpoint(layer), ws, x), "grows"),
    "a scan of each layer alone": (stacks.check_scan_runs, lambda *a: runs(*a, key=id), "grows with the layers"),
    "equal layers together": (
        stacks.check_scan_runs,
        lambda f, ws, x: runs(f, by_shape(ws), x),
        "Which are neighbours",
    ),
    "runs without a checkpoint": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, remat=lambda layer: layer),
        "a checkpoint around the layer",
    ),
    "a checkpoint around each run": (
        stacks.check_scan_runs,
        lambda layer, ws, x: jax.checkpoint(partial(runs, layer))(ws, x),
        "several layers",
    ),
    "a policy that keeps everything": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, remat=everything),
        "a checkpoint around the layer",
    ),
    "runs from last to first": (stacks.check_scan_runs, lambda *a: runs(*a, reverse=True), "first to last"),
    "one scan of all": (stacks.check_scan_runs, lambda *a: runs(*a, key=lambda w: 0), "same shape"),
    "runs by the first array": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, key=lambda w: jax.tree.leaves(w)[0].shape),
        "Are all shapes compared",
    ),
    "runs by their sizes": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, key=lambda w: sum(leaf.size for leaf in jax.tree.leaves(w))),
        "Are all shapes compared",
    ),
    "runs by the set of their shapes": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, key=lambda w: {leaf.shape for leaf in jax.tree.leaves(w)}),
        "Are all shapes compared",
    ),
    "runs by the name of a weight": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, key=lambda w: w["up"].shape),
        "a name of weights",
    ),
    "no gradient for the weights": (
        stacks.check_scan_runs,
        lambda layer, ws, x: runs(layer, jax.lax.stop_gradient(ws), x),
        "is one lost",
    ),
    "a first layer needed": (
        stacks.check_scan_runs,
        lambda layer, ws, x: runs(layer, [ws[0], *ws[1:]], x),
        "need a first one",
    ),
    "runs by their sizes, array by array": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, key=lambda w: [leaf.size for leaf in jax.tree.leaves(w)]),
        "Are all shapes compared",
    ),
    "a run of one without a checkpoint": (
        stacks.check_scan_runs,
        lambda *a: runs_but_alone(*a),
        "in a run of one as well",
    ),
    "nested in each run": (
        stacks.check_scan_runs,
        lambda *a: runs(*a, remat=lambda layer: layer, stack=partial(apply_stack, mode="nested", remat="nothing")),
        "a whole run or a group",
    ),
    "unrolled by the scan": (stacks.check_scan_runs, lambda *a: runs(*a, unroll=True), "does anything unroll"),
    # The groups.
    "the divisor nearest to the formula's root": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n), key=lambda g: abs(g - (n * (1 + 2 * w / x)) ** 0.5)),
        "less is possible|hold twice|How many groups|1 and L are allowed",
    ),
    "the square root": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n), key=lambda g: g + n // g),
        "hold twice",
    ),
    "weights without their gradients": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n), key=lambda g: (g + n // g) * x + n // g * w),
        "hold twice",
    ),
    "layers in a group instead of groups": (
        stacks.check_best_groups,
        lambda n, x, w: n // min(divisors(n), key=lambda g: (g + n // g) * x + 2 * (n // g) * w),
        "number of layers in a group",
    ),
    "weights times groups": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n), key=lambda g: (g + n // g) * x + 2 * g * w),
        "How many groups|less is possible",
    ),
    "no group and no layer alone": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n)[1:-1], key=lambda g: (g + n // g) * x + 2 * (n // g) * w),
        "both among those",
    ),
    "never each layer a group": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n)[:-1], key=lambda g: (g + n // g) * x + 2 * (n // g) * w),
        "1 and L are allowed",
    ),
    "about eight": (stacks.check_best_groups, lambda n, x, w: min(divisors(n), key=lambda g: abs(g - 8)), "hold twice"),
    "the last divisor below the formula's root": (
        stacks.check_best_groups,
        lambda n, x, w: max(g for g in divisors(n) if g * g <= n * (1 + 2 * w / x)),
        "hold twice",
    ),
    "x for w": (
        stacks.check_best_groups,
        lambda n, x, w: min(divisors(n), key=lambda g: (g + n // g) * w + 2 * (n // g) * x),
        "Which is which",
    ),
    "powers of two": (
        stacks.check_best_groups,
        lambda n, x, w: min(
            (g for g in (1, 2, 4, 8, 16, 32, 64) if n % g == 0), key=lambda g: (g + n // g) * x + 2 * (n // g) * w
        ),
        "less is possible",
    ),
    "one group": (stacks.check_best_groups, lambda n, x, w: 1, "less is possible"),
    "only weights": (stacks.check_best_groups, lambda n, x, w: n, "less is possible"),
    "no divisor": (stacks.check_best_groups, lambda n, x, w: math.isqrt(n) + 1, "does not divide"),
    "a fraction": (stacks.check_best_groups, lambda n, x, w: n**0.5, "not of an integer type"),
    # The keys.
    "the same two keys by turns": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(key, w)[jnp.arange(len(w["up"])) % 2]),
        "two layers drew the same mask",
    ),
    "all but the first share a key": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(key, w)[jnp.minimum(jnp.arange(len(w["up"])), 1)]),
        "two layers drew the same mask",
    ),
    "the last layer reuses the first key": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(key, w)[jnp.arange(len(w["up"])) % (len(w["up"]) - 1)]),
        "two layers drew the same mask",
    ),
    "the first layer's weights everywhere": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            layer, jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), w), x, split(key, w)
        ),
        "weights|two layers drew",
    ),
    "weights from last to first": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, jax.tree.map(lambda a: a[::-1], w), x, split(key, w)),
        "first to last",
    ),
    "stopped between layers": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(lambda w, x, k: layer(w, jax.lax.stop_gradient(x), k), w, x, split(key, w)),
        "gradient",
    ),
    "a loop with keys": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: loop_with_keys(jax.checkpoint(layer), w, x, split(key, w)),
        "grows with depth",
    ),
    "keys stacked one by one": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            layer, w, x, jnp.stack([jax.random.fold_in(key, i) for i in range(len(w["up"]))])
        ),
        "grows with depth",
    ),
    "numbers added to the key": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            layer, w, x, jax.vmap(jax.random.key)(jax.random.key_data(key)[-1] + jnp.arange(len(w["up"])))
        ),
        "its neighbour draws",
    ),
    "a key that is drawn from, then split": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: jax.lax.scan(
            lambda carry, w: ((jax.checkpoint(layer)(w, *carry), jax.random.split(carry[1])[0]), None), (x, key), w
        )[0][0],
        "used twice",
    ),
    "the key itself, and keys split from it": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, jnp.concatenate([key[None], split(key, w)[1:]])),
        "used twice",
    ),
    "the last of all layers' results, with keys": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: jax.lax.scan(
            lambda x, wk: (jax.checkpoint(layer)(wk[0], x, wk[1]),) * 2, x, (w, split(key, w))
        )[1][-1],
        "what every layer returns",
    ),
    "two layers in a turn": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            lambda w, x, keys: loop_with_keys(layer, w, x, keys),
            jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), w),
            x,
            split(key, w).reshape(-1, 2),
        ),
        "around several layers",
    ),
    "one key for all layers": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: scan(jax.checkpoint(lambda w, x: layer(w, x, key)), w, x),
        "the same mask",
    ),
    "keys without a checkpoint": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(key, w), remat=lambda f: f),
        "drawn again",
    ),
    "keys and a checkpoint around the loop": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: jax.checkpoint(partial(dropout, layer, remat=lambda f: f))(w, x, split(key, w)),
        "around the loop",
    ),
    "a key of its own making": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(jax.random.key(0), w)),
        "does not use its key",
    ),
    "one key made of the step's": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: scan(jax.checkpoint(lambda w, x: layer(w, x, jax.random.fold_in(key, 1))), w, x),
        "the same mask",
    ),
    "a thousand numbers of the key's bits": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            layer, w, x, jax.vmap(jax.random.key)(jax.random.bits(key) % 1000 + jnp.arange(len(w["up"])))
        ),
        "few numbers",
    ),
    "numbers drawn below a thousand": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(
            layer, w, x, jax.vmap(jax.random.key)(jax.random.randint(key, (len(w["up"]),), 0, 1000))
        ),
        "few numbers|two layers drew",
    ),
    "six keys, whatever the depth": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, jax.random.split(key, 6)),
        "different leading axis sizes",
    ),
    "no gradient for w, with keys": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, jax.lax.stop_gradient(w), x, split(key, w)),
        "does every gradient arrive",
    ),
    "a policy that keeps everything, with keys": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, split(key, w), remat=everything),
        "drawn again",
    ),
    "the key split alike in each turn": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: scan(jax.checkpoint(lambda w, x: layer(w, x, jax.random.split(key)[1])), w, x),
        "the same mask",
    ),
    "every key the first one": (
        stacks.check_dropout_stack,
        lambda layer, w, x, key: dropout(layer, w, x, jnp.broadcast_to(split(key, w)[0], (len(w["up"]),))),
        "the same mask",
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_wrong_answer_is_refused_with_its_hint(name):
    refuse(STACKS[name])


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (stacks.check_layers_that_fit, line),
        (
            stacks.check_layers_that_fit,
            lambda room, layer, a, b: np.floor((room + b - 2 * a) / (2 * layer + (b - a) / 8)),
        ),
        (
            stacks.check_layers_that_fit,
            lambda room, layer, a, b: 8 * (room + b - 2 * a) // (16 * layer + b - a),
        ),
        (stacks.check_scan_runs, runs),
        (stacks.check_scan_runs, runs_by_hand),
        # Of two counts that hold the same either is right.
        (stacks.check_best_groups, lambda n, x, w: min(divisors(n), key=lambda g: (g + n // g) * x + 2 * n // g * w)),
        (
            stacks.check_best_groups,
            lambda n, x, w: jnp.array(min(divisors(n), key=lambda g: g * x + n // g * (x + 2 * w))),
        ),
        (stacks.check_dropout_stack, lambda layer, w, x, key: dropout(layer, w, x, split(key, w))),
        (
            stacks.check_dropout_stack,
            lambda layer, w, x, key: apply_stack(layer, w, x, split(key, w), remat="nothing"),
        ),
    ],
)
def test_a_right_answer_in_other_words_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
