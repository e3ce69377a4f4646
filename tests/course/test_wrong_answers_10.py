"""Wrong answers to the exercises of notebook 10, the silent failures that it shows among them: each is rejected."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import llamem
from jaxmem import Title, compile_report, matmul_flops, saved_residuals, verify_remat
from llamem_course.exercises import suspects
from llamem_course.exercises import trust_but_verify as exercises

ROOT = Path(__file__).resolve().parent.parent.parent
OFF = {Title.CHECKPOINTS, Title.RUNS, Title.MEMORY}
DIFFERENT = {Title.LOSS, Title.GRADIENTS}
RIGHT = {"ada": set(), "ben": {Title.MEMORY}, "cleo": OFF, "dan": DIFFERENT}


def saying(**other):
    """The right diagnosis, but for these suspects."""
    return lambda: RIGHT | other


def scan(body, w, x):
    return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]


def mean_square(x):
    return jnp.mean(x**2)


def dropped(keys_of):
    """A right stack, with the keys that `keys_of(key)` makes."""

    def answer(layer, w, x, key, remat):
        return mean_square(llamem.apply_stack(layer, w, x, keys_of(key), remat="nothing" if remat else None))

    return answer


def closed_over(layer, w, x, key, remat):
    def body(w, x):
        return layer(w, x, key)

    return mean_square(scan(jax.checkpoint(body) if remat else body, w, x))


def dropout(remat_of):
    def answer(layer, w, x, key, remat):
        keys = jax.random.split(key, len(w["up"]))
        return mean_square(llamem.apply_stack(layer, w, x, keys, remat=remat_of(remat)))

    return answer


def after(change, result=mean_square, remat_of=lambda remat: "nothing" if remat else None, keys_of=jax.random.split):
    """A right stack with dropout, of weights and start as `change(w, x, remat)` returns them; and what is returned."""

    def answer(layer, w, x, key, remat):
        w, x = change(w, x, remat)
        keys = keys_of(key, len(w["up"]))
        return result(llamem.apply_stack(layer, w, x, keys, remat=remat_of(remat)))

    return answer


def same(w, x, remat):
    return w, x


def dropout_around(layer, w, x, key, remat):
    def whole(w, x):
        return llamem.apply_stack(layer, w, x, jax.random.split(key, len(w["up"])), remat=None)

    return mean_square((jax.checkpoint(whole) if remat else whole)(w, x))


def last_four(layer, w, x, key, remat):
    both = w, jax.random.split(key, len(w["up"]))
    first, last = (jax.tree.map(lambda a, part=part: a[part], both) for part in (slice(3), slice(3, None)))
    around = jax.checkpoint(layer) if remat else layer
    x = scan(lambda one, x: layer(one[0], x, one[1]), first, x)
    return mean_square(scan(lambda one, x: around(one[0], x, one[1]), last, x))


def stopped_between(layer, w, x, key, remat):
    return after(same)(lambda w, x, key: layer(w, jax.lax.stop_gradient(x), key), w, x, key, remat)


def summed(layer, w, x, key, remat):
    def body(w, x):
        return layer(w, x, jax.random.fold_in(key, jnp.sum(x).astype(jnp.int32)))

    return mean_square(scan(jax.checkpoint(body) if remat else body, w, x))


def flagged(layer, w, x, key, remat):
    return after(same)(layer, w, x, jax.random.fold_in(key, remat), remat)


def unrolled(layer, w, x, key, remat):
    for i, own in enumerate(jax.random.split(key, len(w["up"]))):
        x = (jax.checkpoint(layer) if remat else layer)(jax.tree.map(lambda a, i=i: a[i], w), x, own)
    return mean_square(x)


def temporaries(loss, w, x, remat):
    return compile_report(jax.grad(lambda w, x: loss(w, x, remat)), w, x).parts["temporaries"]


def compared(measure, least=1.0):
    """Whether `measure(loss, w, x, remat)` is smaller with the flag than without, times `least`."""
    return lambda loss, w, x: measure(loss, w, x, True) < least * measure(loss, w, x, False)


def products(loss, w, x, remat):
    return matmul_flops(jax.make_jaxpr(jax.grad(loss), static_argnums=2)(w, x, remat).jaxpr)


def waiting(loss, w, x, remat):
    return saved_residuals(lambda w, x: loss(w, x, remat), w, x).bytes


def forward_alone(loss, w, x, remat):
    return compile_report(lambda w, x: loss(w, x, remat), w, x).parts["temporaries"]


def by_the_library(loss, w, x):
    return verify_remat(loss, w, x, remat=True, baseline=False).holds


# By mistake: the check, the answer, and what the hint is expected to speak of.
WRONG: dict[str, tuple[Callable[..., None], Callable[..., Any], str]] = {
    "sound, all of them": (exercises.check_diagnosis, lambda: {name: set() for name in RIGHT}, "ben: it is not sound"),
    "ada, by looking up case 4": (
        exercises.check_diagnosis,
        saying(ada={Title.RANDOMNESS}),
        "ada: .* does not fail. .* second layer",
    ),
    "ben, by looking up case 1": (exercises.check_diagnosis, saying(ben={Title.OPTIONS}), "Does the layer give"),
    "ben, as if nothing ran again": (exercises.check_diagnosis, saying(ben={Title.RUNS, Title.MEMORY}), "run again"),
    "cleo: memory alone": (exercises.check_diagnosis, saying(cleo={Title.MEMORY}), "not all.*on, right and worth it"),
    "cleo: sound": (exercises.check_diagnosis, saying(cleo=set()), "Which function does the loop run"),
    "cleo: other numbers": (exercises.check_diagnosis, saying(cleo=OFF | {Title.LOSS}), "Can their numbers differ"),
    "dan, by looking up case 5": (
        exercises.check_diagnosis,
        saying(dan=DIFFERENT | {Title.RANDOMNESS}),
        "What is left of NumPy",
    ),
    "dan, by looking up case 8": (exercises.check_diagnosis, saying(dan={Title.CHOICES}), "What is left of NumPy"),
    "dan: the loss alone": (exercises.check_diagnosis, saying(dan={Title.LOSS}), "not all. When does NumPy draw"),
    "dan: sound": (exercises.check_diagnosis, saying(dan=set()), "When does NumPy draw"),
    "ada, memory": (exercises.check_diagnosis, saying(ada={Title.MEMORY}), "ada: .* stand: around what"),
    "dan, no checkpoint": (
        exercises.check_diagnosis,
        saying(dan=DIFFERENT | {Title.CHECKPOINTS}),
        "inside of the loop",
    ),
    "ben, no checkpoint": (exercises.check_diagnosis, saying(ben={Title.CHECKPOINTS, Title.MEMORY}), "in its jaxpr"),
    "a number of a case": (exercises.check_diagnosis, saying(ben={"case 2"}), "is no proof"),
    "one name, no set": (exercises.check_diagnosis, saying(ben="memory falls"), "a set of names"),
    "three of four": (exercises.check_diagnosis, lambda: {n: RIGHT[n] for n in list(RIGHT)[:3]}, "one entry for each"),
    "the sum of squares": (
        exercises.check_cured_dropout,
        after(same, lambda x: jnp.sum(x**2)),
        "mean of the squares",
    ),
    "what leaves the last layer": (exercises.check_cured_dropout, after(same, lambda x: x), "one number"),
    "the first layer skipped": (
        exercises.check_cured_dropout,
        after(lambda w, x, remat: (jax.tree.map(lambda a: a[1:], w), x)),
        "first layer is left out",
    ),
    "no layer at all": (exercises.check_cured_dropout, lambda f, w, x, key, r: mean_square(x), "no layer runs"),
    "gradients stopped": (
        exercises.check_cured_dropout,
        after(lambda w, x, remat: (jax.lax.stop_gradient(w) if remat else w, x)),
        "gradient|runs again",
    ),
    "gradients stopped between layers, in both ways": (
        exercises.check_cured_dropout,
        stopped_between,
        "on its way back",
    ),
    "keys for the check's seven layers": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.random.split(key, 7)),
        r"\(7",
    ),
    "the step's key and six made of it": (
        exercises.check_cured_dropout,
        after(same, keys_of=lambda key, n: jnp.concatenate([key[None], jax.random.split(key, n - 1)])),
        "used once",
    ),
    "keys in pairs": (
        exercises.check_cured_dropout,
        after(same, keys_of=lambda key, n: jax.random.split(key, n)[jnp.arange(n) // 2]),
        "are copies",
    ),
    "keys of the sum of x": (exercises.check_cured_dropout, summed, "different keys"),
    "other keys with the flag": (exercises.check_cured_dropout, flagged, "drawn anew"),
    "a Python loop": (exercises.check_cured_dropout, unrolled, "Scan over the layers"),
    "a checkpoint that keeps h": (
        exercises.check_cured_dropout,
        after(same, remat_of=lambda remat: llamem.Policy(save=("h",)) if remat else None),
        "keep anything else",
    ),
    "the flag upside down": (
        exercises.check_cured_dropout,
        dropout(lambda remat: None if remat else "nothing"),
        "0 of",
    ),
    "the square of the mean": (
        exercises.check_cured_dropout,
        after(same, lambda x: jnp.mean(x) ** 2),
        "mean of the squares",
    ),
    "a policy that keeps everything": (
        exercises.check_cured_dropout,
        after(same, remat_of=lambda remat: "everything_saveable" if remat else None),
        "policies|runs again|memory falls",
    ),
    "one key closed over": (exercises.check_cured_dropout, closed_over, "are copies"),
    "the first of the keys": (
        exercises.check_cured_dropout,
        dropped(lambda key: jnp.broadcast_to(key, (7,))),
        "are copies",
    ),
    "keys for the notebook's six layers": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.random.split(key, 6)),
        "7",
    ),
    "one key stacked": (exercises.check_cured_dropout, dropped(lambda key: jnp.stack([key] * 7)), "are copies"),
    "a key of no layer's number": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, 0 * i))(jnp.arange(7))),
        "1 different keys",
    ),
    "two keys in turn": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.random.split(key, 2)[jnp.arange(7) % 2]),
        "2 different keys",
    ),
    "the first key again for the last layer": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.random.split(key, 6)[jnp.arange(7) % 6]),
        "6 different keys",
    ),
    "keys of layer numbers": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.vmap(jax.random.key)(jnp.arange(7))),
        "in every step",
    ),
    "dropout without remat": (exercises.check_cured_dropout, dropout(lambda remat: None), "0 of them"),
    "dropout with remat always": (exercises.check_cured_dropout, dropout(lambda remat: "nothing"), "flag"),
    "a checkpoint for the last four layers": (exercises.check_cured_dropout, last_four, "Do all layers"),
    "dropout, around the loop": (exercises.check_cured_dropout, dropout_around, "memory falls"),
    "a checkpoint in the jaxpr": (
        exercises.check_worth_it,
        lambda loss, w, x: "checkpoint" in str(jax.make_jaxpr(loss, static_argnums=2)(w, x, True)),
        "everything_saveable.*what does it change",
    ),
    "more products than without": (
        exercises.check_worth_it,
        lambda loss, w, x: products(loss, w, x, True) > products(loss, w, x, False),
        "whole loop.*at once",
    ),
    "a product for each layer": (
        exercises.check_worth_it,
        lambda loss, w, x: products(loss, w, x, False) < products(loss, w, x, True) < 1.2 * products(loss, w, x, False),
        "keeps h.*Which operations",
    ),
    "residuals": (exercises.check_worth_it, compared(waiting, 0.9), "whole loop.*at once"),
    "the forward pass": (exercises.check_worth_it, compared(forward_alone, 0.9), "Do you compare gradients"),
    "the wrong way round": (
        exercises.check_worth_it,
        lambda loss, w, x: temporaries(loss, w, x, False) < temporaries(loss, w, x, True),
        "the one with the flag",
    ),
    "any less is worth it": (exercises.check_worth_it, compared(temporaries, 1.0), "How much less was asked for"),
    "always": (exercises.check_worth_it, lambda loss, w, x: True, "nobody reads"),
    "never": (exercises.check_worth_it, lambda loss, w, x: False, "each layer"),
    "so many bytes": (
        exercises.check_worth_it,
        lambda loss, w, x: temporaries(loss, w, x, True) < 3_000_000,
        "nobody reads|each layer",
    ),
    "the difference itself": (
        exercises.check_worth_it,
        lambda loss, w, x: temporaries(loss, w, x, False) - temporaries(loss, w, x, True),
        "True or False",
    ),
    "the library's line": (exercises.check_worth_it, by_the_library, "library's line"),
    "equal losses": (
        exercises.check_worth_it,
        lambda loss, w, x: bool(jnp.allclose(loss(w, x, True), loss(w, x, False))),
        "nobody reads",
    ),
}


def carried(layer, w, x, key, remat):
    def body(both, w):
        x, key = both
        key, own = jax.random.split(key)
        return (layer(w, x, own), key), None

    return mean_square(jax.lax.scan(jax.checkpoint(body) if remat else body, (x, key), w)[0][0])


def counted(layer, w, x, key, remat):
    body, keys = jax.checkpoint(layer) if remat else layer, jax.random.split(key, len(w["up"]))
    turn = lambda i, x: body(jax.tree.map(lambda a: a[i], w), x, keys[i])  # noqa: E731
    return mean_square(jax.lax.fori_loop(0, len(keys), turn, x))


def nested(layer, w, x, key, remat):
    """No wrong answer: JAX drops what the outer checkpoint would compute again, and the traced work is the same."""
    return dropped(lambda key: jax.random.split(key, len(w["up"])))(
        jax.checkpoint(layer) if remat else layer, w, x, key, remat
    )


def test_a_checkpoint_in_a_checkpoint_of_the_same_layer_computes_nothing_more():
    def products(layer):
        loss = lambda w: dropped(lambda key: jax.random.split(key, 7))(layer, w, exercises._START, exercises._KEY, True)  # noqa: E731
        return matmul_flops(jax.make_jaxpr(jax.grad(loss))(exercises._W).jaxpr)

    assert products(jax.checkpoint(suspects.dropped)) == products(suspects.dropped)


@pytest.mark.parametrize("answer", [carried, counted, nested])
def test_a_right_answer_in_another_style_passes(answer, capsys):
    exercises.check_cured_dropout(answer)
    assert "correct" in capsys.readouterr().out


def by_jax_itself(loss, w, x):
    needs = []
    for remat in (True, False):
        both = jax.jit(jax.value_and_grad(lambda w, x, remat=remat: loss(w, x, remat)))
        analysis = both.lower(w, x).compile().memory_analysis()
        assert analysis
        needs.append(analysis.temp_size_in_bytes)
    return needs[0] / needs[1] <= 0.9


def by_the_peak(loss, w, x):
    reports = [compile_report(jax.grad(lambda w, x, r=r: loss(w, x, r)), w, x) for r in (True, False)]
    return reports[0].peak_bytes < 0.9 * reports[1].peak_bytes


@pytest.mark.parametrize("answer", [by_jax_itself, by_the_peak, compared(temporaries, 0.9)])
def test_a_right_proof_in_another_style_passes(answer, capsys):
    exercises.check_worth_it(answer)
    assert "correct" in capsys.readouterr().out


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected_and_the_hint_is_no_answer(name):
    check, answer, _ = WRONG[name]
    with pytest.raises(AssertionError, match="not yet") as error:
        check(answer)
    hint = str(error.value)
    assert "jax.checkpoint(layer)" not in hint and "split(key" not in hint
    if check is exercises.check_diagnosis:
        told = [title for title in Title if title in hint and title not in str(answer())]
        assert not told, f"the hint names {told}, which the answer did not"


@pytest.mark.parametrize("name", RIGHT)
def test_the_diagnosis_names_what_fails(name):
    assert {proof.name for proof in exercises._verified(name).failed} == RIGHT[name]


def test_the_notebook_shows_the_suspects_as_they_are():
    cells = json.loads((ROOT / "notebooks/10_trust_but_verify.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    for one in (*suspects.SUSPECTS, suspects.dropped):
        assert inspect.getsource(one).replace(": Any", "").replace(" -> Any", "") in text, one.__name__
