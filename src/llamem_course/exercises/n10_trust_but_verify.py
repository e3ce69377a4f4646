"""The exercises of notebook 10: a program that passes the proofs, a diagnosis by them, a proof of one's own."""

import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import llamem
from jaxmem import Title, compile_report, matmul_flops, saved_residuals, verify_remat
from jaxmem.verify.proofs import IF_MEANT
from llamem_course.exercises.exercise import Answer, Exercise

_UP, _DOWN, _X, _KEY = jax.random.split(jax.random.key(5), 4)
_LAYERS = 7  # one more than the notebook's, so that its number written into an answer does not pass
_W = {"up": jax.random.normal(_UP, (_LAYERS, 16, 64)) / 4, "down": jax.random.normal(_DOWN, (_LAYERS, 64, 16)) / 8}
_START = jax.random.normal(_X, (1024, 16))
_POLICIES = jax.checkpoint_policies


def _layer(w: Any, x: Any) -> Any:
    h = checkpoint_name(x @ w["up"], "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


def _scanned(layer: Answer, w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)


def _dropped(w: Any, x: Any, key: Any) -> Any:
    return _layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


# Exercise 1.


def _mean_square(x: Any) -> Any:
    return jnp.mean(x**2)


def _stack(
    layer: Answer,
    w: Any,
    x: Any,
    key: Any,
    remat: bool,
    *,
    change: Answer = lambda w, x, remat: (w, x),
    keys: Answer = jax.random.split,
    around: Answer = lambda layer, remat: jax.checkpoint(layer) if remat else layer,
    result: Answer = _mean_square,
) -> Any:
    """Return the loss of a stack with dropout, right but for what is given."""
    w, x = change(w, x, remat)
    body, both = around(layer, remat), (w, keys(key, len(w["up"])))
    return result(jax.lax.scan(lambda x, one: (body(one[0], x, one[1]), None), x, both)[0])


def _but(**mistake: Answer) -> Answer:
    return partial(_stack, **mistake)


def _keeping(policy: Any) -> Answer:
    return _but(around=lambda layer, remat: jax.checkpoint(layer, policy=policy) if remat else layer)


def _part(which: slice) -> Answer:
    return _but(change=lambda w, x, remat: (jax.tree.map(operator.itemgetter(which), w), x))


def _stopped_between(layer: Answer, *given: Any) -> Any:
    return _stack(lambda w, x, key: layer(w, jax.lax.stop_gradient(x), key), *given)


def _one_key(layer: Answer, w: Any, x: Any, key: Any, remat: bool) -> Any:
    return _stack(lambda w, x, _: layer(w, x, key), w, x, key, remat)


def _unrolled(layer: Answer, w: Any, x: Any, key: Any, remat: bool) -> Any:
    keys = jax.random.split(key, len(w["up"]))
    return _mean_square(llamem.apply_stack(layer, w, x, keys, mode="unroll", remat="nothing" if remat else None))


def _around_the_loop(layer: Answer, w: Any, x: Any, key: Any, remat: bool) -> Any:
    plain = lambda w, x: _stack(layer, w, x, key, False)  # noqa: E731
    return (jax.checkpoint(plain) if remat else plain)(w, x)


def _loss_and_gradients(answer: Answer, n_layers: int, remat: bool) -> Any:
    """Return the loss without dropout, and its gradients of weights and start."""

    def loss(w: Any, x: Any) -> Any:
        return answer(lambda w, x, key: _layer(w, x), w, x, _KEY, remat)

    w = jax.tree.map(operator.itemgetter(slice(n_layers)), _W)
    found = loss(w, _START)
    assert found is not None, "Return the mean of the squares of what leaves the last layer."
    assert np.shape(found) == (), f"Return one number, the mean of the squares, not {np.shape(found)} of them."
    return jax.value_and_grad(loss, (0, 1))(w, _START)


def _in_numbers(got: Any, expected: Any, *_: Any) -> str:
    if not np.isclose(got[0], expected[0], rtol=1e-3):
        return f"the loss is {float(got[0]):.4f}, and should be {float(expected[0]):.4f}."
    return "the loss is right, and its gradient is another than that of the plain layers."


def _passes_the_proofs(answer: Answer) -> None:
    def loss(w: Any, batch: Any, remat: bool) -> Any:
        return answer(_dropped, w, batch["x"], batch["key"], remat)

    verification = verify_remat(loss, _W, {"x": _START, "key": _KEY}, remat=True, baseline=False)
    for proof in () if verification.holds else verification.failed[:1]:
        cause, _, _ = proof.cause.partition(IF_MEANT)  # how to leave a proof out is no hint here
        raise AssertionError(f"{proof.name}: {proof.seen.rstrip('.')}. {cause.strip()}")


def _draws_with_own_keys(answer: Answer) -> None:
    """Read the numbers of the keys: a trace shows only where they come from."""
    for remat in (False, True):
        drawn: list[Any] = []

        def layer(w: Any, x: Any, key: Any, drawn: list[Any] = drawn) -> Any:
            jax.debug.callback(lambda numbers: drawn.append(tuple(np.ravel(numbers))), jax.random.key_data(key))
            return _layer(w, x)

        jax.block_until_ready(answer(layer, _W, _START, _KEY, remat))
        jax.effects_barrier()
        assert tuple(np.ravel(jax.random.key_data(_KEY))) not in drawn, (
            "A layer draws with the step's key itself, of which the other layers' keys are made. JAX promises "
            "independent numbers only where a key is used once: to draw, or to make others of it."
        )
        assert len(set(drawn)) == len(drawn), (
            f"{len(drawn)} layers draw with {len(set(drawn))} keys: those that share one drop the same units."
        )


def _keeps_inputs_alone(answer: Answer) -> None:
    kept = saved_residuals(lambda w: answer(_dropped, w, _START, _KEY, True), _W).rows
    streams = sum(row.bytes for row in kept if not row.argument) / _START.nbytes
    assert streams <= _LAYERS + 2, (
        f"It keeps {streams:.1f} times the bytes of x for the backward pass, for {_LAYERS} layers. Each needs one, its "
        "input. Do all layers have a checkpoint, and does it keep anything else?"
    )


check_cured_dropout = Exercise(
    1,
    _stack,
    {f"With {n} layers and remat={remat}": (n, remat) for n, remat in ((_LAYERS, False), (_LAYERS, True), (3, True))},
    "Keys travel with the weights.",
    {
        "Is the last layer left out?": _part(slice(-1)),
        "Is the first layer left out?": _part(slice(1, None)),
        "Do the layers run in reverse order?": _part(slice(None, None, -1)),
        "Does any layer run?": lambda layer, w, x, key, remat: _mean_square(x),
        "The squares first, then their mean": [
            _but(result=lambda x: jnp.sum(x**2)),
            _but(result=lambda x: jnp.mean(x) ** 2),
        ],
        "Return one number": _but(result=lambda x: x),
        "Is a gradient stopped on its way back through weights, or through what a layer hands to the next?": [
            _but(change=lambda w, x, remat: (jax.lax.stop_gradient(w) if remat else w, x)),
            _stopped_between,
        ],
        "could not use your answer": _but(keys=lambda key, n: jax.random.split(key, 6)),
    },
    {
        _passes_the_proofs: {
            "whatever the flag says": _but(around=lambda layer, remat: jax.checkpoint(layer)),
            "0 of": _but(around=lambda layer, remat: layer),
            "are copies": [_one_key, _but(keys=lambda key, n: jax.random.split(key, n - 1)[jnp.arange(n) % (n - 1)])],
            "in every step": _but(keys=lambda key, n: jax.vmap(jax.random.key)(jnp.arange(n))),
            "drawn anew": lambda layer, w, x, key, remat: _stack(layer, w, x, jax.random.fold_in(key, remat), remat),
            "merged both computations": _unrolled,
            "memory falls": _around_the_loop,
            "runs again": _keeping(_POLICIES.everything_saveable),
        },
        _draws_with_own_keys: {
            "used once": _but(keys=lambda key, n: jnp.concatenate([key[None], jax.random.split(key, n - 1)])),
            "drop the same units": _but(
                keys=lambda key, n: jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n) // 2)
            ),
        },
        _keeps_inputs_alone: {"keep anything else": _keeping(_POLICIES.save_only_these_names("h"))},
    },
    otherwise="Run all layers, in order, then take the mean of the squares.",
    ask=_loss_and_gradients,
    told=_in_numbers,
    rtol=1e-3,
)


# Exercise 2. First the programs of its statement, line by line.
# ruff: noqa: D103


def ada(w: Any, batch: Any, remat: bool) -> Any:
    def body(numbered: Any, x: Any) -> Any:
        w, i = numbered
        return _dropped(w, x, jax.random.fold_in(batch["key"], i))

    numbered = w, jnp.arange(len(w["up"]))
    return _scanned(jax.checkpoint(body) if remat else body, numbered, batch["x"])


def ben(w: Any, batch: Any, remat: bool) -> Any:
    keep_h = _POLICIES.save_only_these_names("h")
    loss = partial(_scanned, _layer)
    return (jax.checkpoint(loss, policy=keep_h) if remat else loss)(w, batch["x"])


def cleo(w: Any, batch: Any, remat: bool) -> Any:
    body = _layer
    if remat:
        jax.checkpoint(body)
    return _scanned(body, w, batch["x"])


def dan(w: Any, batch: Any, remat: bool) -> Any:
    def body(w: Any, x: Any) -> Any:
        return _layer(w, x) * np.random.normal(1.0, 0.1)

    return _scanned(jax.checkpoint(body) if remat else body, w, batch["x"])


# What to ask where a proof that fails is missing from the answer, and where one stands in it that holds.
_QUESTIONS = {
    ada: (
        "Run it by hand through two layers.",
        "It closes over a key. With which key does the second layer draw, and with which the third?",
    ),
    ben: (
        "Is the loop inside of the checkpoint, or around it? What is there when the backward pass begins?",
        "Is there a checkpoint in its jaxpr? Does the layer give the name that is kept? Are the numbers those of the "
        "plain program, and does anything run again?",
    ),
    cleo: (
        "Which function does the loop run? Go through the proofs: which of them would notice that nothing has changed?",
        "With the flag and without, which program is traced? Can their numbers differ? And does a proof fail that "
        "finds nothing to judge?",
    ),
    dan: (
        "When does NumPy draw: each time the layer runs, or while the function is traced? How often is it traced, "
        "to compare both ways?",
        "What is left of NumPy's draw in a traced program? A proof can only judge what it finds there, and what the "
        "layer computes again.",
    ),
}
_NAMES = [suspect.__name__ for suspect in _QUESTIONS]
_OFF, _DIFFERENT = {Title.CHECKPOINTS, Title.RUNS, Title.MEMORY}, {Title.LOSS, Title.GRADIENTS}


@functools.cache
def _failed(suspect: Answer) -> set[str]:
    batch = {"x": _START, "key": _KEY}
    return {proof.name for proof in verify_remat(suspect, _W, batch, remat=True, baseline=False).failed}


def _diagnosed(answer: Answer, suspect: Answer) -> bool:
    """Compare what is said of one suspect with the proofs."""
    all_said, name = answer(), suspect.__name__
    well_formed = isinstance(all_said, dict) and set(all_said) == set(_NAMES)
    assert well_formed, f"Return a dictionary with one entry for each of {', '.join(_NAMES)}."
    said, failed, (missed, unfounded) = all_said[name], _failed(suspect), _QUESTIONS[suspect]
    kind = isinstance(said, set | frozenset | list | tuple)
    assert kind, f"{name}: a set of names is expected, empty for a sound program, not {said!r}."
    for one in said:
        assert one in list(Title), f"{name}: {one!r} is no proof. verify_remat prints their names, up to the colon."
        if suspect in (ada, dan) and one in _OFF:
            unfounded = "Where does its checkpoint stand: around what, and inside of the loop or outside?"
        assert one in failed, f"{name}: {str(one)!r} does not fail. {unfounded}"
    so_far = "what you name does fail, and it is not all" if said else "it is not sound"
    assert set(said) == failed, f"{name}: {so_far}. {missed}"
    return True


def _saying(**other: Any) -> Answer:
    """Return the right diagnosis, but for these suspects."""
    right = {"ada": set(), "ben": {Title.MEMORY}, "cleo": _OFF, "dan": _DIFFERENT}
    return lambda: right | other


check_diagnosis = Exercise(
    2,
    _saying(),
    {suspect.__name__: (suspect,) for suspect in _QUESTIONS},
    "Three faults, three signatures; and one that only looks like a fault.",
    {
        "With which key does the second layer draw": _saying(ada={Title.RANDOMNESS}),
        "Where does its checkpoint stand": _saying(dan=_DIFFERENT | {Title.CHECKPOINTS}),
        "ben: it is not sound": _saying(**{name: set() for name in _NAMES}),
        "Does the layer give the name": [_saying(ben={Title.OPTIONS}), _saying(ben={Title.RUNS, Title.MEMORY})],
        "Which function does the loop run": _saying(cleo={Title.MEMORY}),
        "Can their numbers differ": _saying(cleo=_OFF | {Title.LOSS}),
        "When does NumPy draw": _saying(dan={Title.LOSS}),
        "What is left of NumPy": _saying(dan=_DIFFERENT | {Title.RANDOMNESS}),
        "is no proof": _saying(ben={"case 2"}),
        "a set of names": _saying(ben="memory falls"),
        "one entry for each": lambda: {"ada": set(), "ben": {Title.MEMORY}},
    },
    ask=_diagnosed,
)


# Exercise 3. By program: its loss, whether its checkpoint is worth it, what to ask of an answer that thinks otherwise.


def _with(around: Answer) -> Answer:
    return lambda w, x, remat: _scanned(around(_layer) if remat else _layer, w, x)


def _around_all(w: Any, x: Any, remat: bool) -> Any:
    whole = partial(_scanned, _layer)
    return (jax.checkpoint(whole) if remat else whole)(w, x)


def _in_a_python_loop(w: Any, x: Any, remat: bool) -> Any:
    body = jax.checkpoint(_layer, prevent_cse=False) if remat else _layer
    for i in range(len(w["up"])):
        x = body(jax.tree.map(operator.itemgetter(i), w), x)
    return _mean_square(x)


def _sixteenths(n: int) -> Answer:
    """Return a loss with a checkpoint for `n` sixteenths of the rows."""

    def loss(w: Any, x: Any, remat: bool) -> Any:
        rows = n * len(x) // 16  # and a product of two losses, so that what both keep waits at once
        return _scanned(_layer, w, x[rows:]) * _with(jax.checkpoint)(w, x[:rows], remat)

    return loss


_WORTH = {
    "a checkpoint around each layer": (
        _with(jax.checkpoint),
        True,
        "It keeps only the layer's input. Do you compare gradients, and the one with the flag with the one without?",
    ),
    "everything_saveable": (
        _with(partial(jax.checkpoint, policy=_POLICIES.everything_saveable)),
        False,
        "Its checkpoint stands in the program, and the numbers are right. What does it change of what is needed?",
    ),
    "a checkpoint around the whole loop": (
        _around_all,
        False,
        "Few residuals wait between its passes. How much is there at once while the backward pass runs?",
    ),
    "a policy that keeps h": (
        _with(partial(jax.checkpoint, policy=_POLICIES.save_only_these_names("h"))),
        True,
        "No matmul runs again in it. Which operations do, and what need not be kept because of them?",
    ),
    "prevent_cse=False in a Python loop": (
        _in_a_python_loop,
        False,
        "Its matmuls run again in the jaxpr, and little waits. Does the compiled program compute anything twice?",
    ),
    "a checkpoint for a sixteenth of the rows": (
        _sixteenths(1),
        False,
        "It does need less, by about a twentieth. How much less was asked for?",
    ),
    "a checkpoint for three sixteenths of the rows": (
        _sixteenths(3),
        True,
        "It needs about a sixth less. From how much on is a checkpoint worth it?",
    ),
}


def _judged(answer: Answer, name: str, n_layers: int, rows: int) -> bool:
    loss, worth, question = _WORTH[name]
    used = getattr(getattr(answer, "__code__", None), "co_names", ())
    assert not {"verify_remat", "assert_remat"} & set(used), (
        "verify_remat is the library's line, and this exercise builds it. Which two numbers would you compare?"
    )
    found = answer(loss, jax.tree.map(operator.itemgetter(slice(n_layers)), _W), _START[:rows])
    assert np.asarray(found).dtype == bool, f"Return True or False, not {found!r}: is the checkpoint worth it?"
    told = f"{name}, {rows:,} rows, {n_layers} layers: your proof says {bool(found)}. {question}"
    assert bool(found) == worth, told
    return worth


def _temporaries(loss: Answer, w: Any, x: Any, remat: bool) -> int:
    return compile_report(jax.grad(lambda w, x: loss(w, x, remat)), w, x).parts["temporaries"]


def _matmuls(loss: Answer, w: Any, x: Any, remat: bool) -> int:
    return matmul_flops(jax.make_jaxpr(jax.grad(loss), static_argnums=2)(w, x, remat).jaxpr)


def _residuals(loss: Answer, w: Any, x: Any, remat: bool) -> int:
    return saved_residuals(lambda w, x: loss(w, x, remat), w, x).bytes


def _smaller(measure: Answer, least: float = 0.9) -> Answer:
    """Whether `measure(loss, w, x, remat)` is smaller with the flag than without, times `least`."""
    return lambda loss, w, x: measure(loss, w, x, True) < least * measure(loss, w, x, False)


check_worth_it = Exercise(
    3,
    lambda loss, w, x: next(worth for one, worth, _ in _WORTH.values() if one is loss),
    {f"{name}, {rows} rows": (name, layers, rows) for layers, rows in ((_LAYERS, 1024), (3, 256)) for name in _WORTH},
    "It asks the compiler what it needs: a checkpoint is judged by its effect.",
    {
        "Do you compare gradients": [
            lambda loss, w, x: False,
            _smaller(lambda loss, w, x, remat: compile_report(partial(loss, remat=remat), w, x).parts["temporaries"]),
        ],
        "What does it change": [
            lambda loss, w, x: True,
            lambda loss, w, x: "remat" in str(jax.make_jaxpr(partial(loss, remat=True))(w, x)),
        ],
        "How much is there at once": [
            lambda loss, w, x: _matmuls(loss, w, x, True) > _matmuls(loss, w, x, False),
            _smaller(_residuals),
        ],
        "Does the compiled program": lambda loss, w, x: (
            _smaller(_residuals)(loss, w, x) and _matmuls(loss, w, x, True) < 1.3 * _matmuls(loss, w, x, False)
        ),
        "Which operations do": lambda loss, w, x: (
            _matmuls(loss, w, x, False) < _matmuls(loss, w, x, True) < 1.2 * _matmuls(loss, w, x, False)
        ),
        "How much less was asked for": _smaller(_temporaries, 1.0),
        "From how much on": _smaller(_temporaries, 0.5),
        "Return True or False": lambda loss, w, x: _temporaries(loss, w, x, False) - _temporaries(loss, w, x, True),
        "the library's line": lambda loss, w, x: verify_remat(loss, w, x, remat=True, baseline=False).holds,
    },
    ask=_judged,
)
