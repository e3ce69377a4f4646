"""Wrong answers to the exercises of notebooks 01 and 02, the misconceptions that they refute among them: each is
rejected, with a hint that leads on and does not give the answer away.
"""

import importlib
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
import llamem
from jaxmem.compiling import matmul_flops
from llamem_course.exercises.checkpoint_policies import priced
from llamem_course.grid_figure import play

# By module and check: what no hint may hold, and the wrong answers by the mistake that they make.
WRONG: dict[tuple[str, str], tuple[tuple[str, ...], dict[str, str]]] = {
    ("checkpoint_basics", "check_rematerialised_stack"): (
        ("jax.checkpoint", "scan", "checkpoint(layer)"),
        {
            "the first eight layers": "lambda layer, w, x: loop(jax.checkpoint(layer), w[:8], x)",
            "no checkpoint": "lambda layer, w, x: loop(layer, w, x)",
            "a loop without barriers": "lambda layer, w, x: loop(jax.checkpoint(layer, prevent_cse=False), w, x)",
            "all but the first layer": "lambda layer, w, x: loop(jax.checkpoint(layer), w[1:], layer(w[0], x))",
            "groups of three": "lambda layer, w, x: groups(layer, layer, w, x, 3)",
            "anything saved": "lambda layer, w, x: scan("
            "jax.checkpoint(layer, policy=policies.save_anything_except_these_names()), w, x)",
            "inputs in 16 bits": "lambda layer, w, x: scan(jax.checkpoint(lambda w, x: layer("
            "w, x.astype(jnp.bfloat16).astype(jnp.float32))), w, x)",
            "around the whole stack": "lambda layer, w, x: jax.checkpoint(lambda w, x: loop(layer, w, x))(w, x)",
            "around the whole scan": "lambda layer, w, x: jax.checkpoint(lambda w, x: scan(layer, w, x))(w, x)",
            "made and not used": "lambda layer, w, x: (jax.checkpoint(layer), loop(layer, w, x))[1]",
            "dots_saveable": "lambda layer, w, x: scan(jax.checkpoint(layer, policy=policies.dots_saveable), w, x)",
            "everything_saveable": "lambda layer, w, x: scan("
            "jax.checkpoint(layer, policy=policies.everything_saveable), w, x)",
            "every other layer": "lambda layer, w, x: alternate(layer, w, x)",
            "groups of two": "lambda layer, w, x: groups(layer, layer, w, x, 2)",
            "products without a batch axis": "lambda layer, w, x: scan("
            "jax.checkpoint(layer, policy=policies.dots_with_no_batch_dims_saveable), w, x)",
            "groups and layers": "lambda layer, w, x: groups(jax.checkpoint(layer), layer, w, x, 2)",
            "eight layers written in": "lambda layer, w, x: loop(jax.checkpoint(layer), w[jnp.arange(8)], x)",
            "one layer left out": "lambda layer, w, x: scan(jax.checkpoint(layer), w[:-1], x)",
            "backwards": "lambda layer, w, x: scan(jax.checkpoint(layer), w[::-1], x)",
            "the scan's pair": "lambda layer, w, x: jax.lax.scan("
            "lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)",
            "a layer of its own": "lambda layer, w, x: scan("
            "jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w)) + x), w, x)",
            "the whole and its layers": "lambda layer, w, x: jax.checkpoint("
            "lambda w, x: scan(jax.checkpoint(layer), w, x))(w, x)",
            "gradients stopped": "lambda layer, w, x: scan(jax.checkpoint(layer), jax.lax.stop_gradient(w), x)",
            "a group of three, and a layer alone": "lambda layer, w, x: loop(jax.checkpoint(layer), w[4:], "
            "layer(w[3], groups(layer, layer, w[:3], x, 3)))",
            "by hand, but all is kept": "lambda layer, w, x: loop(by_hand(layer, twice=False), w, x)",
        },
    ),
    ("checkpoint_basics", "check_best_group"): (
        ("sqrt", "// size + size", "n_layers // size"),
        {
            "always four": "lambda n, kept: 4",
            "two where that divides": "lambda n, kept: 2 - n % 2",
            "the second largest divisor": "lambda n, kept: ([1] + [s for s in range(1, n) if n % s == 0])[-1]",
            "eight, or the next divisor below": "lambda n, kept: max(s for s in range(1, 9) if n % s == 0)",
            "everything for each layer of a group": "lambda n, kept: min("
            "(s for s in range(1, n + 1) if n % s == 0), key=lambda s: n / s + 11 * s)",
            "the root, no whole number": "lambda n, kept: n**0.5",
            "one layer": "lambda n, kept: 1",
            "all layers": "lambda n, kept: n",
            "the root, divisor or not": "lambda n, kept: int(n**0.5)",
            "the smallest divisor": "lambda n, kept: next(s for s in range(2, n + 2) if n % s == 0 or s > n)",
            "the largest divisor": "lambda n, kept: max(s for s in range(1, max(2, n)) if n % s == 0)",
            "a quarter": "lambda n, kept: max(1, n // 4)",
            "the logarithm, or the next divisor below": "lambda n, kept: next("
            "s for s in range(n.bit_length(), 0, -1) if n % s == 0)",
            "the largest divisor below a third": "lambda n, kept: max(s for s in range(1, n + 1) "
            "if n % s == 0 and s <= max(1, n // 3))",
            "how many groups": "lambda n, kept: n // min("
            "(s for s in range(1, n + 1) if n % s == 0), key=lambda s: n / s + kept * s)",
            "inputs alone, whatever is kept": "lambda n, kept: min("
            "(s for s in range(1, n + 1) if n % s == 0), key=lambda s: n / s + s)",
            "kept for the groups": "lambda n, kept: min("
            "(s for s in range(1, n + 1) if n % s == 0), key=lambda s: kept * n / s + s)",
            "the divisor nearest to the root": "lambda n, kept: min("
            "(s for s in range(1, n + 1) if n % s == 0), key=lambda s: abs(s - (n / kept) ** 0.5))",
            "twice the inputs of a group": "lambda n, kept: min((s for s in range(1, n + 1) if n % s == 0), "
            "key=lambda s: n / s + 3 * s)",
        },
    ),
    ("checkpoint_basics", "check_grouped_stack"): (
        ("jax.checkpoint", "scan", "reshape"),
        {
            "no checkpoint": "lambda layer, w, x, size: loop(layer, w, x)",
            "the notebook's layer, not the one given": "lambda layer, w, x, size: groups("
            "jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w)) + x), layer, w, x, size)",
            "layers alone": "lambda layer, w, x, size: scan(jax.checkpoint(layer), w, x)",
            "groups alone": "lambda layer, w, x, size: groups(layer, layer, w, x, size)",
            "the whole and its layers": "lambda layer, w, x, size: jax.checkpoint("
            "lambda w, x: scan(jax.checkpoint(layer), w, x))(w, x)",
            "size for count": "lambda layer, w, x, size: groups(jax.checkpoint(layer), layer, w, x, len(w) // size)",
            "always groups of three": "lambda layer, w, x, size: groups(jax.checkpoint(layer), layer, w, x, 3)",
            "layers keep everything": "lambda layer, w, x, size: groups("
            "jax.checkpoint(layer, policy=policies.everything_saveable), layer, w, x, size)",
            "groups keep products": "lambda layer, w, x, size: groups("
            "jax.checkpoint(layer), layer, w, x, size, policies.dots_saveable)",
            "layers keep products": "lambda layer, w, x, size: groups("
            "jax.checkpoint(layer, policy=policies.dots_saveable), layer, w, x, size)",
            "all but the first layer of a group": "lambda layer, w, x, size: inside("
            "lambda w, x: scan(jax.checkpoint(layer), w[1:], layer(w[0], x)), w, x, size)",
            "all but the second layer of a group": "lambda layer, w, x, size: inside(lambda w, x: scan("
            "jax.checkpoint(layer), w[2:], layer(w[1], jax.checkpoint(layer)(w[0], x))), w, x, size)",
            "pairs in a group": "lambda layer, w, x, size: inside("
            "lambda w, x: groups(layer, layer, w, x, 2), w, x, size)",
            "half the size": "lambda layer, w, x, size: groups(jax.checkpoint(layer), layer, w, x, max(1, size // 2))",
            "one level more": "lambda layer, w, x, size: jax.checkpoint("
            "lambda w, x: groups(jax.checkpoint(layer), layer, w, x, size))(w, x)",
            "only the first layer of a group": "lambda layer, w, x, size: first_of_each(layer, w, x, size)",
            "only the first group nested": "lambda layer, w, x, size: first_nested(layer, w, x, size)",
            "twelve layers written in": "lambda layer, w, x, size: groups("
            "jax.checkpoint(layer), layer, w[:12], x, size)",
            "the first group alone": "lambda layer, w, x, size: groups("
            "jax.checkpoint(layer), layer, w[:size], x, size)",
        },
    ),
    ("checkpoint_policies", "check_best_policy"): (
        ("combinations", "itertools", "max(", "sum("),
        {
            "nothing": "lambda t, b: llamem.Policy()",
            "all names": "lambda t, b: llamem.Policy(save=tuple(n for n in t if n not in ('gate', 'up')))",
            "the chart's line": "lambda t, b: llamem.Policy(save=('q', 'k', 'v', 'attn'))",
            "three names": "lambda t, b: llamem.Policy(save=max((s for s in fitting(t, b) if len(s) < 4), "
            "key=lambda s: total(t, s, 1)))",
            "less than the budget": "lambda t, b: llamem.Policy(save=max((s for s in fitting(t, b) "
            "if total(t, s, 0) < b), key=lambda s: total(t, s, 1), default=()))",
            "the better of two orders": "lambda t, b: llamem.Policy(save=max((in_order(t, b, key).save for key in "
            "(lambda n: -t[n][1], lambda n: -t[n][1] / t[n][0])), key=lambda s: total(t, s, 1)))",
            "the most for a byte on the whole": "lambda t, b: llamem.Policy(save=max("
            "fitting(t, b), key=lambda s: total(t, s, 1) / max(1, total(t, s, 0))))",
            "without attn_out": "lambda t, b: llamem.Policy(save=max((s for s in fitting(t, b) "
            "if 'attn_out' not in s), key=lambda s: total(t, s, 1)))",
            "cheapest first": "lambda t, b: in_order(t, b, lambda n: t[n][0])",
            "the greatest saving first": "lambda t, b: in_order(t, b, lambda n: -t[n][1])",
            "the most for a byte first": "lambda t, b: in_order(t, b, lambda n: (-t[n][1] / t[n][0], -t[n][0]))",
            "the most for a byte first, then the cheapest": "lambda t, b: "
            "in_order(t, b, lambda n: (-t[n][1] / t[n][0], t[n][0]))",
            "as the table has them": "lambda t, b: in_order(t, b, lambda n: 0)",
            "the fullest budget": "lambda t, b: llamem.Policy(save=max(fitting(t, b), key=lambda s: total(t, s, 0)))",
            "the most names": "lambda t, b: llamem.Policy(save=max(fitting(t, b), key=len))",
            "one name": "lambda t, b: llamem.Policy(save=max((s for s in fitting(t, b) if len(s) < 2), "
            "key=lambda s: total(t, s, 1)))",
            "a budget for each layer": "lambda t, b: llamem.Policy(save=max(fitting(t, 16 * b), "
            "key=lambda s: total(t, s, 1)))",
            "names, not a policy": "lambda t, b: max(fitting(t, b), key=lambda s: total(t, s, 1))",
            "all of it to the host": "lambda t, b: llamem.Policy(offload=tuple(t))",
            "the inputs as well": "lambda t, b: llamem.Policy(save=('block_in',))",
        },
    ),
    ("checkpoint_policies", "check_residual_bytes"): (
        ("itemsize", "n_kv_heads *", "n_layers *", "262,144,000", "524,288,000"),
        {
            "always 16 bits": "lambda c, N, names: 2 * elements(c, N, names)",
            "the weights' type": "lambda c, N, names: c.param_dtype.itemsize * elements(c, N, names)",
            "heads as wide as the model": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, q=c.d_model, attn=c.d_model)",
            "no inputs": "lambda c, N, names: c.compute_dtype.itemsize * "
            "(elements(c, N, names) - c.n_layers * N * c.d_model)",
            "all heads have keys": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, k=c.n_heads * c.head_dim, v=c.n_heads * c.head_dim)",
            "a quarter of the width for keys": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, k=c.d_model // 4, v=c.d_model // 4)",
            "three and a half widths for the feed-forward": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, gate=7 * c.d_model // 2, up=7 * c.d_model // 2)",
            "narrow feed-forward": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, gate=c.d_model, up=c.d_model)",
            "elements": "lambda c, N, names: elements(c, N, names)",
            "the first name alone": "lambda c, N, names: c.compute_dtype.itemsize * elements(c, N, names[:1])",
            "outputs of layers, too": "lambda c, N, names: c.compute_dtype.itemsize * "
            "(elements(c, N, names) + c.n_layers * N * c.d_model)",
            "the input of the first layer alone": "lambda c, N, names: c.compute_dtype.itemsize * "
            "(elements(c, N, names) - (c.n_layers - 1) * N * c.d_model)",
            "a logsumexp whatever is kept": "lambda c, N, names: c.compute_dtype.itemsize * elements(c, N, names)"
            " + 4 * c.n_layers * N * c.n_heads",
            "one layer more": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c.replace(n_layers=c.n_layers + 1), N, names)",
            "one layer": "lambda c, N, names: c.compute_dtype.itemsize * elements(c, N, names) // c.n_layers",
            "in MiB": "lambda c, N, names: c.compute_dtype.itemsize * elements(c, N, names) / 2**20",
            "names without a type": "lambda c, N, names: c.n_layers * N * c.d_model * c.compute_dtype.itemsize",
            "a thousand tokens written in": "lambda c, N, names: c.compute_dtype.itemsize * elements(c, 1000, names)",
            "keys of one head": "lambda c, N, names: c.compute_dtype.itemsize * "
            "elements(c, N, names, k=c.head_dim, v=c.head_dim)",
        },
    ),
    ("checkpoint_policies", "check_thrifty"): (
        ("checkpoint_name(", "save_only_these_names(", "@ w2, "),
        {
            "no checkpoint": "lambda w1, w2, w3, x: jnp.sin(jnp.tanh(x @ w1) @ w2) @ w3",
            "no policy": "lambda *a: jax.checkpoint(named)(*a)",
            "named and nothing else": "lambda *a: named(*a)",
            "named outside": "lambda *a: checkpoint_name(jax.checkpoint(named)(*a), 'narrow')",
            "the input has the name": "lambda *a: save('narrow', lambda w1, w2, w3, x: "
            "jnp.sin(jnp.tanh(checkpoint_name(x, 'narrow') @ w1) @ w2) @ w3)(*a)",
            "in 16 bits": "lambda *a: save('narrow', lambda w1, w2, w3, x: jnp.sin(checkpoint_name("
            "(jnp.tanh(x @ w1) @ w2).astype(jnp.bfloat16), 'narrow').astype(jnp.float32)) @ w3)(*a)",
            "one checkpoint more around it": "lambda *a: jax.checkpoint(save('narrow', named))(*a)",
            "everything_saveable": "lambda *a: jax.checkpoint(named, policy=policies.everything_saveable)(*a)",
            "dots_saveable": "lambda *a: jax.checkpoint(named, policy=policies.dots_saveable)(*a)",
            "another name": "lambda *a: save('narow', named)(*a)",
            "the sine has the name": "lambda *a: save('narrow', lambda w1, w2, w3, x: "
            "checkpoint_name(jnp.sin(jnp.tanh(x @ w1) @ w2), 'narrow') @ w3)(*a)",
            "the wide one has the name": "lambda *a: save('narrow', lambda w1, w2, w3, x: "
            "jnp.sin(checkpoint_name(jnp.tanh(x @ w1), 'narrow') @ w2) @ w3)(*a)",
            "named and not used": "lambda *a: save('narrow', unused)(*a)",
            "both have the name": "lambda *a: save('narrow', lambda w1, w2, w3, x: jnp.sin(checkpoint_name("
            "checkpoint_name(jnp.tanh(x @ w1), 'narrow') @ w2, 'narrow')) @ w3)(*a)",
            "all but the name": "lambda *a: jax.checkpoint("
            "named, policy=policies.save_anything_except_these_names('narrow'))(*a)",
            "another layer": "lambda *a: save('narrow', lambda w1, w2, w3, x: jnp.tanh("
            "checkpoint_name(jnp.tanh(x @ w1) @ w2, 'narrow')) @ w3)(*a)",
            "gradients stopped": "lambda *a: save('narrow', lambda w1, w2, w3, x: jnp.sin("
            "checkpoint_name(jax.lax.stop_gradient(jnp.tanh(x @ w1)) @ w2, 'narrow')) @ w3)(*a)",
        },
    ),
}


def loop(layer, w, x):
    for one in w:
        x = layer(one, x)
    return x


def scan(layer, w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def by_hand(layer, twice=True):
    """A layer that runs again in its own backward pass, or one that only looks like it."""
    once = jax.custom_vjp(layer)
    if twice:
        once.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, g: jax.vjp(layer, *kept)[1](g))
    else:
        once.defvjp(lambda w, x: jax.vjp(layer, w, x), lambda back, g: back(g))
    return once


def alternate(layer, w, x):
    for i, one in enumerate(w):
        x = (jax.checkpoint(layer) if i % 2 else layer)(one, x)
    return x


def groups(inner, layer, w, x, size, policy=None):
    del layer
    for start in range(0, len(w), size):
        x = jax.checkpoint(lambda w, x: loop(inner, w, x), policy=policy)(w[start : start + size], x)
    return x


def inside(group, w, x, size):
    for start in range(0, len(w), size):
        x = jax.checkpoint(group)(w[start : start + size], x)
    return x


def first_of_each(layer, w, x, size):
    """Groups whose first layer alone has a checkpoint of its own."""

    def group(w, x):
        return loop(layer, w[1:], jax.checkpoint(layer)(w[0], x))

    for start in range(0, len(w), size):
        x = jax.checkpoint(group)(w[start : start + size], x)
    return x


def first_nested(layer, w, x, size):
    """The first group as asked; the others keep everything when they run again."""
    x = groups(jax.checkpoint(layer), layer, w[:size], x, size)
    return groups(layer, layer, w[size:], x, size)


def total(table, names, column):
    return sum(table[name][column] for name in names)


def fitting(table, budget):
    choices = [names for n in range(len(table) + 1) for names in itertools.combinations(table, n)]
    return [names for names in choices if total(table, names, 0) <= budget]


def in_order(table, budget, key):
    """Names in an order, each that still fits."""
    names = []
    for name in sorted(table, key=key):
        if total(table, [*names, name], 0) <= budget:
            names.append(name)
    return llamem.Policy(save=tuple(names))


def elements(c, tokens, names, **other):
    width = dict.fromkeys(("q", "attn"), c.n_heads * c.head_dim) | dict.fromkeys(("k", "v"), c.n_kv_heads * c.head_dim)
    width |= dict(gate=c.d_ff, up=c.d_ff) | other
    return c.n_layers * tokens * (c.d_model + sum(width[name] for name in names))


def named(w1, w2, w3, x):
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w1) @ w2, "narrow")) @ w3


def halves(w1, w2, w3, x):
    narrow = jax.checkpoint(lambda w1, w2, x: jnp.tanh(x @ w1) @ w2)(w1, w2, x)
    return jax.checkpoint(lambda narrow, w3: jnp.sin(narrow) @ w3)(narrow, w3)


def unused(w1, w2, w3, x):
    narrow = jnp.tanh(x @ w1) @ w2
    checkpoint_name(narrow, "narrow")
    return jnp.sin(narrow) @ w3


def save(name, fn):
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(name))


CASES = [
    pytest.param(*key, answer, given_away, id=f"{key[1].removeprefix('check_')}-{mistake}")
    for key, (given_away, answers) in WRONG.items()
    for mistake, answer in answers.items()
]


@pytest.mark.parametrize(("topic", "check", "answer", "given_away"), CASES)
def test_a_wrong_answer_is_rejected_with_a_hint_that_is_no_answer(topic, check, answer, given_away):
    module = importlib.import_module(f"llamem_course.exercises.{topic}")
    names = {"jax": jax, "jnp": jnp, "llamem": llamem, "policies": jax.checkpoint_policies, "replace": replace}
    with pytest.raises(AssertionError) as error:
        getattr(module, check)(eval(answer, names | globals()))
    hint = str(error.value)
    assert len(re.findall(r"[a-z]+", hint)) > 6, hint
    assert not [words for words in given_away if words in hint], hint


# Hints that name the mistake: by check and mistake.
NAMED = {
    ("check_rematerialised_stack", "a group of three, and a layer alone"): "Which of yours runs once",
    ("check_rematerialised_stack", "a loop without barriers"): "where no barrier stands",
    ("check_best_group", "inputs alone, whatever is kept"): "if each of these layers kept 1",
    ("check_residual_bytes", "one layer"): "one layer's. This model has 32",
    ("check_residual_bytes", "in MiB"): "yours are MiB",
}


@pytest.mark.parametrize(("check", "mistake"), NAMED)
def test_a_hint_names_the_mistake(check, mistake):
    (topic,) = (topic for topic, other in WRONG if other == check)
    answer = WRONG[topic, check][1][mistake]
    module = importlib.import_module(f"llamem_course.exercises.{topic}")
    with pytest.raises(AssertionError, match=NAMED[check, mistake]):
        getattr(module, check)(eval(answer, {"jax": jax, "jnp": jnp, "llamem": llamem, **globals()}))


@pytest.mark.parametrize(
    ("topic", "check", "answer"),
    [
        ("checkpoint_basics", "check_rematerialised_stack", "lambda f, w, x: loop(jax.checkpoint(f), w, x)"),
        ("checkpoint_basics", "check_rematerialised_stack", "lambda f, w, x: scan(jax.checkpoint(f), w, x)"),
        (
            "checkpoint_basics",
            "check_rematerialised_stack",
            "lambda f, w, x: llamem.apply_stack(f, w, x, mode='unroll', remat='nothing')",
        ),
        ("checkpoint_basics", "check_rematerialised_stack", "lambda f, w, x: loop(by_hand(f), w, x)"),
        ("checkpoint_basics", "check_rematerialised_stack", "lambda f, w, x: scan(by_hand(f), w, x)"),
        (
            "checkpoint_basics",
            "check_best_group",
            "lambda n, kept: min((s for s in range(1, n + 1) if n % s == 0), "
            "key=lambda s: play('nested', n, s).live(kept, everything=11).max())",
        ),
        (
            "checkpoint_basics",
            "check_grouped_stack",
            "lambda f, w, x, size: groups(jax.checkpoint(f), f, w, x, size)",
        ),
        (
            "checkpoint_basics",
            "check_grouped_stack",
            "lambda f, w, x, size: jax.lax.scan(lambda x, w: (jax.checkpoint(lambda w, x: "
            "scan(jax.checkpoint(f), w, x))(w, x), None), x, w.reshape(-1, size, *w.shape[1:]))[0]",
        ),
        (
            "checkpoint_basics",
            "check_grouped_stack",
            "lambda f, w, x, size: inside(lambda w, x: f(w[-1], scan(jax.checkpoint(f), w[:-1], x)), w, x, size)",
        ),
        ("checkpoint_policies", "check_thrifty", "lambda *a: save('narrow', named)(*a)"),
        ("checkpoint_policies", "check_thrifty", "lambda *a: halves(*a)"),
        (
            "checkpoint_policies",
            "check_thrifty",
            "lambda *a: jax.checkpoint(named, policy=jax.checkpoint_policies.save_and_offload_only_these_names("
            "names_which_can_be_saved=[], names_which_can_be_offloaded=['narrow'], offload_src='device', "
            "offload_dst='pinned_host'))(*a)",
        ),
        (
            "checkpoint_policies",
            "check_residual_bytes",
            "lambda c, N, names: c.compute_dtype.itemsize * elements(c, N, names)"
            " + 4 * c.n_layers * N * c.n_heads * ('attn' in names)",
        ),
    ],
)
def test_right_answers_in_other_words_are_accepted(topic, check, answer, capsys):
    module = importlib.import_module(f"llamem_course.exercises.{topic}")
    getattr(module, check)(
        eval(answer, {"jax": jax, "jnp": jnp, "np": np, "play": play, "llamem": llamem, **globals()})
    )
    assert "correct" in capsys.readouterr().out


def test_a_last_layer_without_a_checkpoint_is_told_what_it_keeps(capsys):
    module = importlib.import_module("llamem_course.exercises.checkpoint_basics")
    module.check_rematerialised_stack(lambda f, w, x: f(w[-1], loop(jax.checkpoint(f), w[:-1], x)))
    assert "of the last one, which has no checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names", [("q",), ("k",), ("attn",), ("attn_out",), ("gate",), ("v", "attn", "attn_out", "up")]
)
def test_the_table_of_notebook_02_says_what_saved_names_keep_and_spare(names):
    config = llamem.LlamaConfig.from_name("tiny").replace(n_layers=3, head_dim=24)
    tokens_BT = jax.ShapeDtypeStruct((1, 40), jnp.int32)

    def flops_and_bytes(remat):
        plan = llamem.Plan(remat=remat, attention="xla")
        graphdef, params = nnx.split(nnx.eval_shape(lambda: llamem.Llama(config, rngs=nnx.Rngs(0), plan=plan)))

        def loss(params, tokens_BT):
            return jnp.sum(nnx.merge(graphdef, params).hidden(tokens_BT))

        flops = matmul_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens_BT).jaxpr)
        return flops, jaxmem.saved_residuals(loss, params, tokens_BT).bytes

    nothing, saved = flops_and_bytes("nothing"), flops_and_bytes(llamem.Policy(save=names))
    n_bytes, spared = (total(priced(config, 40), names, column) for column in (0, 1))
    assert nothing[0] - saved[0] == spared
    assert saved[1] - nothing[1] == n_bytes
