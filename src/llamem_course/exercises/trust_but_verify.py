"""Checks of notebook 10's exercises: a program that passes the proofs, a diagnosis by them, a proof of one's own."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import Title, Verification, saved_residuals, verify_remat
from jaxmem.verify.proofs import IF_MEANT
from llamem_course.exercises import grade
from llamem_course.exercises.suspects import SUSPECTS
from llamem_course.exercises.suspects import dropped as _dropped
from llamem_course.exercises.suspects import layer as _layer
from llamem_course.exercises.suspects import scanned as _scanned

_UP, _DOWN, _X, _KEY = jax.random.split(jax.random.key(5), 4)
_LAYERS = 7  # one more than the notebook's, so that its number written into an answer does not pass
_W = {"up": jax.random.normal(_UP, (_LAYERS, 16, 64)) / 4, "down": jax.random.normal(_DOWN, (_LAYERS, 64, 16)) / 8}
_START = jax.random.normal(_X, (1024, 16))


# Exercise 2: what to ask of one that is sound where it is said to need memory, or not to be on; and of each suspect,
# where a proof that fails is missing from the answer, and where one stands in it that holds.
_PLACE = "Where does its checkpoint stand: around what, and inside of the loop or outside?"
_QUESTIONS = {
    "ada": (
        "Run it by hand through two layers.",
        "It closes over a key, like case 4. With which key does the second layer draw, and with which the third?",
    ),
    "ben": (
        "Is the loop inside of the checkpoint, or around it? What is there when the backward pass begins?",
        "Is there a checkpoint in its jaxpr? Does the layer give the name that is kept? Are the numbers those of the "
        "plain program, and does anything run again?",
    ),
    "cleo": (
        "Which function does the loop run? Go through the groups 'on', 'right' and 'worth it': which of them would "
        "notice that nothing has changed?",
        "With the flag and without, which program is traced? Can their numbers differ? And does a proof fail that "
        "finds nothing to judge?",
    ),
    "dan": (
        "When does NumPy draw: each time the layer runs, or while the function is traced? How often is it traced, "
        "to compare both ways?",
        "What is left of NumPy's draw in a traced program? A proof can only judge what it finds there, and what the "
        "layer computes again.",
    ),
}


def _mean_square(w: Any, layers: range) -> float:
    """Return what the loss should be, layer by layer in NumPy."""
    x = np.asarray(_START, np.float64)
    for i in layers:
        x = x + np.sin(np.tanh(x @ np.asarray(w["up"][i], np.float64))) @ np.asarray(w["down"][i], np.float64)
    return float(np.mean(x**2))


def _plain(w: Any, x: Any) -> Any:
    for i in range(len(w["up"])):
        x = _layer(jax.tree.map(operator.itemgetter(i), w), x)
    return jnp.mean(x**2)


def _check_numbers(loss: Callable[..., Any], n_layers: int) -> None:
    """Raise AssertionError where `loss(w, x, remat)`, free of random numbers, is not that of all layers in order."""
    w = jax.tree.map(operator.itemgetter(slice(n_layers)), _W)
    expected = _mean_square(w, range(n_layers))
    for remat in (False, True):
        if (found := loss(w, _START, remat)) is None:
            raise AssertionError("Return the mean of the squares of what leaves the last layer.")
        if np.shape(found) != ():
            raise AssertionError(
                f"Return one number, not an array of shape {np.shape(found)}: the mean of the squares."
            )
        if not np.isclose(found, expected, rtol=1e-3):
            mistakes = {
                "the last layer is left out": range(n_layers - 1),
                "the first layer is left out": range(1, n_layers),
                "the layers run in reverse order": range(n_layers)[::-1],
                "no layer runs": range(0),
            }
            likely = [words for words, some in mistakes.items() if np.isclose(found, _mean_square(w, some), rtol=1e-3)]
            raise AssertionError(
                f"With {n_layers} layers and remat={remat} the loss is {float(found):.4f}; in NumPy it is "
                f"{expected:.4f}. "
                + (
                    f"It seems that {likely[0]}."
                    if likely
                    else "Run all layers, in order, then take the mean of the squares."
                )
            )
        slope, right = (jax.grad(one, (0, 1))(w, _START) for one in (functools.partial(loss, remat=remat), _plain))
        if not all(jax.tree.leaves(jax.tree.map(functools.partial(np.allclose, rtol=1e-2, atol=1e-5), slope, right))):
            raise AssertionError(
                f"With remat={remat} the loss is right, and its gradient is another than that of the plain layers. Is "
                "one stopped on its way back through weights, or through what a layer hands to the next?"
            )


def _battery(loss: Callable[[Any, Any, Any], Any], batch: Any, w: Any = _W) -> None:
    verification = verify_remat(loss, w, batch, remat=True, baseline=False)
    if not verification.holds:
        proof = verification.failed[0]
        cause, _, _ = proof.cause.partition(IF_MEANT)  # how to leave a proof out is no hint here
        raise AssertionError(f"{proof.name}: {proof.seen.rstrip('.')}. {cause.strip()}")


@functools.cache
def _verified(name: str) -> Verification:
    (suspect,) = (one for one in SUSPECTS if one.__name__ == name)
    return verify_remat(suspect, _W, {"x": _START, "key": _KEY}, remat=True, baseline=False)


def check_diagnosis(fn: Callable[[], Any]) -> None:
    """Exercise 2: for each of the notebook's four suspects the proofs that fail, compared with `verify_remat`."""

    def body() -> str:
        answer, names = fn(), [suspect.__name__ for suspect in SUSPECTS]
        if not isinstance(answer, dict) or set(answer) != set(names):
            raise AssertionError(f"Return a dictionary with one entry for each of {', '.join(names)}.")
        for name in names:
            said = answer[name]
            if not isinstance(said, set | frozenset | list | tuple):
                raise AssertionError(f"{name}: a set of names is expected, empty for a sound program, not {said!r}.")
            verification = _verified(name)
            for one in said:
                if one not in list(Title):
                    raise AssertionError(
                        f"{name}: {one!r} is no proof. verify_remat prints their names, up to the colon."
                    )
            failed = {proof.name for proof in verification.failed}
            missed, unfounded = _QUESTIONS[name]
            for one in said:
                if one not in failed:
                    placed = name in ("ada", "dan") and one in (Title.CHECKPOINTS, Title.RUNS, Title.MEMORY)
                    raise AssertionError(f"{name}: {str(one)!r} does not fail. {_PLACE if placed else unfounded}")
            if failed - set(said):
                so_far = "what you name does fail, and it is not all" if said else "it is not sound"
                raise AssertionError(f"{name}: {so_far}. {missed}")
        return "Three faults, three signatures; and one that only looks like a fault."

    grade(2, body)


def _check_keys(fn: Callable[..., Any]) -> None:
    """Raise AssertionError where layers draw with equal keys: a trace shows where keys come from, not their numbers."""
    for remat in (False, True):
        drawn = []

        def layer(w: Any, x: Any, key: Any, drawn: list = drawn) -> Any:
            jax.debug.callback(lambda numbers: drawn.append(tuple(np.ravel(numbers))), jax.random.key_data(key))
            return _layer(w, x)

        jax.block_until_ready(fn(layer, _W, _START, _KEY, remat))
        jax.effects_barrier()
        if len(set(drawn)) < _LAYERS:
            raise AssertionError(
                f"With remat={remat} the {_LAYERS} layers draw with {len(set(drawn))} different keys. Print the "
                "numbers of each layer's key, jax.random.key_data(key): which are equal?"
            )
        if tuple(np.ravel(jax.random.key_data(_KEY))) in drawn:
            raise AssertionError(
                "A layer draws with the step's key itself, of which the other layers' keys are made. JAX promises "
                "independent numbers only where a key is used once: to draw, or to make others of it."
            )


def check_cured_dropout(fn: Callable[..., Any]) -> None:
    """Exercise 1: one key per layer, made of the step's, and a checkpoint around each layer."""

    def body() -> str:

        def without_dropout(w: Any, x: Any, remat: bool) -> Any:
            return fn(lambda w, x, key: _layer(w, x), w, x, _KEY, remat)

        _check_numbers(without_dropout, _LAYERS)
        _battery(lambda w, b, remat: fn(_dropped, w, b["x"], b["key"], remat), {"x": _START, "key": _KEY})
        _check_keys(fn)
        kept = saved_residuals(lambda w: fn(_dropped, w, _START, _KEY, True), _W).rows
        streams = sum(row.bytes for row in kept if not row.argument) / _START.nbytes
        if streams > _LAYERS + 2:
            raise AssertionError(
                f"It keeps {streams:.1f} times the bytes of x for the backward pass, for {_LAYERS} layers. Each needs "
                "one, its input. Do all layers have a checkpoint, and does it keep anything else?"
            )
        _check_numbers(without_dropout, 3)
        return "Keys travel with the weights."

    grade(1, body)


# Exercise 3: by program, whether its checkpoint is worth it, and what to ask of an answer that thinks otherwise.
_KEEPS_H = jax.checkpoint_policies.save_only_these_names("h")
_WORTH = {
    "a checkpoint around each layer": (
        True,
        "It keeps only the layer's input. Do you compare gradients, and the one with the flag with the one without?",
    ),
    "a flag that nobody reads": (False, "Both its programs are the same. What would have to differ?"),
    "everything_saveable": (
        False,
        "Its checkpoint stands in the traced program. But what does it change of what the gradient needs?",
    ),
    "a checkpoint around the whole loop": (
        False,
        "Few residuals wait between its passes, and everything runs again. How much is there at once while the "
        "backward pass runs?",
    ),
    "a policy that keeps h": (
        True,
        "No product runs again in it. Which operations do, and what need not be kept because of them?",
    ),
    "a checkpoint around each layer, and a gradient that is stopped": (
        True,
        "Whether it is right is another proof's question. Asked was only whether the checkpoint saves memory.",
    ),
    "a checkpoint for a sixteenth of the rows": (
        False,
        "It does need less, by about a twentieth. How much less was asked for?",
    ),
}


def _of_two_ways(name: str) -> Callable[[Any, Any, Any], Any]:
    """Return the loss of one of `_WORTH`, with a flag."""

    def loss(w: Any, x: Any, remat: bool) -> Any:
        whole = functools.partial(_scanned, _layer)
        if "stopped" in name and remat:
            w = w | {"up": jax.lax.stop_gradient(w["up"])}
        if "sixteenth" in name:  # a product of two losses, so that what both keep waits at once
            rows = len(x) // 16
            few = functools.partial(_scanned, jax.checkpoint(_layer)) if remat else whole
            return whole(w, x[rows:]) * few(w, x[:rows])
        if not remat or name == "a flag that nobody reads":
            return whole(w, x)
        if name == "a checkpoint around the whole loop":
            return jax.checkpoint(whole)(w, x)
        policy = {"everything_saveable": jax.checkpoint_policies.everything_saveable, "a policy that keeps h": _KEEPS_H}
        return _scanned(jax.checkpoint(_layer, policy=policy.get(name)), w, x)

    return loss


def check_worth_it(fn: Callable[..., Any]) -> None:
    """Exercise 3: a proof that a checkpoint saves memory."""

    def body() -> str:
        if "verify_remat" in getattr(getattr(fn, "__code__", None), "co_names", ()):
            raise AssertionError(
                "verify_remat is the library's line, and this exercise builds it. Which two numbers of the first "
                "section would you compare?"
            )
        small = jax.tree.map(operator.itemgetter(slice(3)), _W)
        for w, x in ((_W, _START), (small, _START[:256])):
            for name, (worth, question) in _WORTH.items():
                found = fn(_of_two_ways(name), w, x)
                if not isinstance(found, bool | np.bool_) and not (hasattr(found, "dtype") and found.dtype == bool):
                    raise AssertionError(f"Return True or False, not {found!r}: is the checkpoint worth it?")
                if bool(found) != worth:
                    raise AssertionError(
                        f"{name}, {len(x):,} rows, {len(w['up'])} layers: your proof says {bool(found)}. {question}"
                    )
        return "It asks the compiler what it needs: a checkpoint is judged by its effect."

    grade(3, body)
