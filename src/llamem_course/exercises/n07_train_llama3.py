"""The exercises of notebook 07."""

import collections
import contextlib
import gc
import itertools
import math
import os
import random
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises.exercise import Answer, Exercise


def _pair(ids: Any, wrote: Any, *, no_loss: int = -100) -> tuple[Any, Any]:
    return ids[:-1], np.where(wrote, ids, no_loss)[1:]


def _two_arrays(answer: Answer, ids: Any, wrote: Any) -> tuple[np.ndarray, ...]:
    found = answer(ids.copy(), wrote.copy())
    assert isinstance(found, tuple | list) and len(found) == 2, "Return inputs and targets, as a pair."
    pair = tuple(map(np.asarray, found))
    for name, part in zip(("inputs", "targets"), pair, strict=True):
        assert part.shape == (len(ids) - 1,), (
            f"Your {name} have the shape {part.shape}. A chat of {len(ids)} tokens has {len(ids) - 1} places at which "
            "a next token is known."
        )
    return pair


check_inputs_and_targets = Exercise(
    1,
    _pair,
    {
        f"ids {ids}, wrote {wrote}": (np.asarray(ids), np.asarray(wrote, bool))
        for ids, wrote in (
            ([11, 12, 13, 14, 15, 16, 17], [0, 0, 0, 1, 1, 1, 0]),
            ([21, 22, 23, 24, 25, 22, 27, 28, 29], [0, 0, 1, 1, 0, 0, 0, 1, 1]),
            ([5, 0, 7, 0], [0, 1, 0, 1]),
        )
    },
    "The model reads the whole chat, and learns only to write its own part.",
    {
        "Return inputs and targets, as a pair.": lambda ids, wrote: _pair(ids, wrote)[1],
        "places at which a next token is known": lambda ids, wrote: (ids[wrote][:-1], ids[wrote][1:]),
        "The model reads every token but the last, the user's and the assistant's alike, since an answer depends on "
        "the question.": lambda ids, wrote: (np.where(wrote, ids, -100)[:-1], _pair(ids, wrote)[1]),
        "They are the right tokens, and the marks are one place off: is it who wrote the input that counts, or who "
        "wrote the token that is to be predicted?": lambda ids, wrote: (ids[:-1], np.where(wrote[:-1], ids[1:], -100)),
        "Each target is its own input: what has a model to learn in order to repeat what it reads?": (
            lambda ids, wrote: (ids[:-1], np.where(wrote, ids, -100)[:-1])
        ),
        "Every target counts. Whose words should the model learn to write?": lambda ids, wrote: (ids[:-1], ids[1:]),
        "A target of 0 is a token like another. Which number counts for nothing?": partial(_pair, no_loss=0),
        "Which of the tokens that come next did the assistant write? All others are -100.": (
            lambda ids, wrote: _pair(ids, ~wrote)
        ),
        "The right places count; which token comes after each?": (
            lambda ids, wrote: (ids[:-1], np.where(wrote[1:], np.roll(ids, -2)[:-1], -100))
        ),
    },
    otherwise="Which tokens that come next did the assistant write? All others are -100.",
    ask=_two_arrays,
    told=lambda got, *_: f"your inputs are {got[0].tolist()}, your targets {got[1].tolist()}.",
)


def _drawn(seed: int | Sequence[int] | np.random.SeedSequence, count: int) -> Any:
    return np.random.default_rng(seed).permutation(count)


def _by(order: Answer, moved: int = 0) -> Answer:
    """Return the solution with another `order(seed, epoch, count)`."""

    def sequences_of(step: int, seed: int, count: int, batch_size: int) -> list[int]:
        places = [divmod(number, count) for number in range(step * batch_size, (step + 1) * batch_size)]
        orders = {epoch: order(seed, epoch, count) for epoch in {epoch for epoch, _ in places}}
        return [int(orders[epoch][place]) + moved for epoch, place in places]

    return sequences_of


def _numbers(answer: Answer, steps: Any, seed: int, count: int, batch_size: int) -> list[int]:
    """Return the numbers of the sequences that steps read, one after the other."""
    numbers: list[int] = []
    for step in steps:
        batch = np.asarray(answer(step, seed, count, batch_size))
        assert batch.shape == (batch_size,), (
            f"Step {step} should read {batch_size} sequences, one number for each; yours has the shape {batch.shape}. "
            "What does a batch do where an epoch ends?"
        )
        assert batch.dtype.kind in "iu" and batch.min() >= 0 and batch.max() < count, (
            f"Sequences are numbered from 0 to {count - 1}, in whole numbers; step {step} reads {batch.tolist()}."
        )
        numbers += batch.tolist()
    return numbers


def _epochs(answer: Answer, seed: int, count: int, batch_size: int) -> np.ndarray:
    """Return the orders of the first two epochs."""
    numbers = _numbers(answer, range(-(-2 * count // batch_size)), seed, count, batch_size)
    return np.reshape(numbers[: 2 * count], (2, count))


def _missing(orders: Any, _: Any, seed: int, count: int, batch_size: int) -> str:
    first = next(i for i, order in enumerate(orders) if len(set(order)) < count)
    missing = min(set(range(count)) - set(orders[first]))
    return f"among the {('first', 'second')[first]} {count} that are read, {missing} is missing and others come twice."


def _alike(one: Any, other: Any) -> bool:
    """Whether most neighbours of one order are neighbours in another, or most numbers moved by one amount."""
    pairs = [{frozenset(pair) for pair in itertools.pairwise(order)} for order in (one, other)]
    moved = collections.Counter((b - a) % len(one) for a, b in zip(one, other, strict=True))
    return max(len(pairs[0] & pairs[1]), *moved.values()) > len(one) // 2


def _is_shuffled(answer: Answer) -> None:
    first, second = _epochs(answer, 0, 60, 4)
    assert not _alike(first, range(60)), "The sequences come as they lie in the data: where are they shuffled?"
    assert not _alike(first, second), (
        "The second epoch has the order of the first, or most of it: what should the order depend on, beside the seed?"
    )
    assert not _alike(first, _epochs(answer, 1, 60, 4)[0]), (
        "Seeds 0 and 1 give one order, or nearly so: where does the seed come in?"
    )
    shuffled = {tuple(_numbers(answer, range(2), seed, 8, 4)) for seed in range(40)}
    assert len(shuffled) > 30, "Over 40 seeds few orders come: how many are there of eight sequences?"


_MAKERS = [(np.random, name) for name in ("default_rng", "SeedSequence", "RandomState", "PCG64", "MT19937", "Philox")]
_MAKERS += [(random, "Random"), (jax.random, "key"), (jax.random, "PRNGKey"), (jax.random, "fold_in")]


def _watching(maker: Any, given: list[Any]) -> Any:
    """Return a function or class that makes what `maker` does, and writes down what it is given."""

    def make(*args: Any, **options: Any) -> Any:
        given.extend([*args, *options.values()])
        return maker(*args, **options)

    of_class = {"__new__": lambda cls, *args, **options: make(*args, **options)}
    return type(maker.__name__, (maker,), of_class) if isinstance(maker, type) else make


def _made_of(answer: Answer, seed: int, epoch: int) -> list[int]:
    """Return the whole numbers of which generators are made for an epoch."""
    given: list[Any] = []
    with contextlib.ExitStack() as watched:
        for place, name in _MAKERS:
            watched.enter_context(mock.patch.object(place, name, _watching(getattr(place, name), given)))
        _numbers(answer, [epoch], seed, 12, 12)
    numbers = [one for one in jax.tree.leaves(given) if isinstance(one, int | np.integer | np.ndarray)]
    return [int(one) for some in numbers for one in np.ravel(some)]


def _orders_never_meet(answer: Answer) -> None:
    """Ask for pairs of a seed and an epoch that a recipe such as 1000 * seed + epoch maps to the same number.

    Where one number grew with both, by `a` for each seed and by `b` for each epoch, seed `b` and epoch `a` give it too.
    """
    asked = [(0, 0), (1, 0), (0, 1)]
    for start, of_seed, of_epoch in zip(*(_made_of(answer, *one) for one in asked[:3]), strict=False):
        a, b = abs(of_seed - start), abs(of_epoch - start)
        if 0 < a < 2**32 and 0 < b < 2**32:
            seed, epoch = b // math.gcd(a, b), a // math.gcd(a, b)
            asked += [(seed, 0), (0, epoch), (seed, epoch)]
    far = 2, 3, 10, 100, 1000, 65_536, 1_000_000
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    for seed, epoch in [*asked, *itertools.product((0, 1), far), *itertools.product(far, (0, 1))]:
        order = tuple(_numbers(answer, [epoch], seed, 12, 12))
        other = seen.setdefault(order, (seed, epoch))
        assert other == (seed, epoch), (
            f"Epoch {epoch:,} of seed {seed:,} has the order of epoch {other[1]:,} of seed {other[0]:,}: what should "
            "be independent reads the same. How do two numbers become one seed without meeting?"
        )


def _survives_a_restart(answer: Answer) -> None:
    """Ask for steps, then again with the late ones first, and with what a new process has otherwise or not at all."""
    asked = [(7, 0), (2, 0), (14, 0), (2, 1), (22, 1)]
    before = [_numbers(answer, [step], seed, 60, 4) for step, seed in asked]
    for one in gc.get_objects():
        if type(one) is type(_when_first_asked) and one.__module__ == getattr(answer, "__module__", None):
            one.cache_clear()
    np.random.seed(4711)

    def salted(one: Any, hashed: Answer = hash) -> int:
        return hashed(one) ^ (4711 * any(isinstance(part, str | bytes) for part in jax.tree.leaves(one)))

    with mock.patch("builtins.hash", salted), mock.patch("os.getpid", lambda: 4711):
        after = [_numbers(answer, [step], seed, 60, 4) for step, seed in asked[::-1]][::-1]
    for (step, seed), here, there in zip(asked, before, after, strict=True):
        assert here == there, (
            f"Step {step} of seed {seed} reads {here}, and {there} as in a new process: late steps were asked for "
            "first, and caches were empty. What do your orders depend on that was asked before, or that differs from "
            "process to process?"
        )


def _replays_nothing(answer: Answer) -> None:
    """Count the lines of Python that an early and a late step run."""
    lines, before = collections.Counter(), sys.gettrace()
    for step in (0, 20_000):

        def count(frame: Any, event: str, _: Any, step: int = step) -> Any:
            lines[step] += event == "line"
            return count

        answer(step, 0, 10, 4)  # warms it up
        sys.settrace(count)
        try:
            answer(step, 0, 10, 4)
        finally:
            sys.settrace(before)
    assert lines[20_000] < 3 * lines[0] + 1000, (
        f"Step 0 takes {lines[0]:,} lines of Python, step 20,000 {lines[20_000]:,}: is every epoch before it shuffled "
        "again? What does one order need?"
    )


def _replayed(step: int, seed: int, count: int, batch_size: int) -> Any:
    rng = np.random.default_rng([seed, 1])
    orders = [rng.permutation(count) for _ in range(-(-(step + 1) * batch_size // count))]
    return np.concatenate(orders)[step * batch_size :][:batch_size]


_generators: dict[int, np.random.Generator] = {}


@cache
def _when_first_asked(seed: int, epoch: int, count: int) -> Any:
    return _generators.setdefault(seed, np.random.default_rng(seed)).permutation(count)


def _epoch_by_epoch(step: int, seed: int, count: int, size: int, *, batches: int, cut: Answer) -> Any:
    """Return a batch that begins and ends in one epoch of so many batches."""
    epoch, batch = divmod(step, batches)
    return cut(_drawn([seed, epoch], count)[batch * size :], size)


_CONSECUTIVE = "Of which order are the batches of one epoch consecutive parts, and where does the next begin?"

check_order = Exercise(
    2,
    _by(lambda seed, epoch, count: _drawn([seed, epoch], count)),
    {f"{count} sequences, {size} in a batch": (0, count, size) for count, size in ((60, 4), (10, 4), (3, 8))},
    "Seed and epoch make the order, the step a place in it: a run that was killed has lost nothing.",
    {
        "one number for each": lambda step, seed, count, size: step * size % count,
        "What does a batch do where an epoch ends?": lambda step, seed, count, size: _epoch_by_epoch(
            step, seed, count, size, batches=-(-count // size), cut=lambda order, size: order[:size]
        ),
        "Sequences are numbered from 0 to": _by(lambda seed, epoch, count: range(count), moved=1),
        _CONSECUTIVE: [
            lambda step, seed, count, size: np.random.default_rng([seed, step]).integers(count, size=size),
            lambda step, seed, count, size: _epoch_by_epoch(
                step, seed, count, size, batches=max(count // size, 1), cut=np.resize
            ),
        ],
    },
    {
        _is_shuffled: {
            "as they lie in the data": _by(lambda seed, epoch, count: range(count)),
            "beside the seed": _by(lambda seed, epoch, count: np.roll(_drawn(seed, count), epoch)),
            "where does the seed come in": _by(lambda seed, epoch, count: np.roll(_drawn(epoch, count), seed)),
            "few orders": _by(lambda seed, epoch, count: _drawn([seed % 2, epoch], count)),
        },
        _orders_never_meet: {
            "How do two numbers become one seed without meeting?": [
                _by(lambda seed, epoch, count: _drawn(np.random.SeedSequence(seed + 7919 * epoch), count)),
                _by(lambda seed, epoch, count: _drawn([99_991 * seed - epoch + 2**40], count)),
                _by(lambda seed, epoch, count: _drawn([seed, epoch % 65_536], count)),
                _by(lambda seed, epoch, count: np.random.RandomState(1_000_003 * seed + epoch).permutation(count)),
                _by(lambda seed, epoch, count: random.Random(7919 * seed + epoch).sample(range(count), count)),
            ]
        },
        _survives_a_restart: {
            "as in a new process": [
                _by(_when_first_asked),
                _by(lambda seed, epoch, count: _drawn(abs(hash(("order", (seed, epoch)))), count)),
                _by(lambda seed, epoch, count: _drawn([os.getpid(), seed, epoch], count)),
            ],
        },
        _replays_nothing: {"is every epoch before it shuffled again": _replayed},
    },
    otherwise=_CONSECUTIVE,
    ask=_epochs,
    told=_missing,
    accepts=lambda orders, _: all(len(set(order)) == len(order) for order in orders.tolist()),
)


def _loss(params: Any, x_BD: Any) -> Any:
    return jnp.mean(jnp.tanh(x_BD @ params["in"]) @ params["out"]).astype(jnp.float32)


def _inputs(dtype: Any, rows: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"in": jax.random.normal(keys[0], (4, 8), dtype), "out": jax.random.normal(keys[1], (8, 2), dtype)}
    return params, 1 + jax.random.normal(keys[2], (rows, 4), dtype) / 4


def _whole(value_and_grad: Answer, params: Any, batch_BD: Any, parts: int) -> Any:
    return value_and_grad(params, batch_BD)


def _parts(batch_BD: Any, parts: int) -> Any:
    return batch_BD.reshape(parts, -1, *batch_BD.shape[1:])


def _summed(
    value_and_grad: Answer,
    params: Any,
    batch_BD: Any,
    parts: int,
    *,
    wide: Any = (jnp.float32, jnp.float32),
    add: Answer = lambda total, one, parts: total + one.astype(total.dtype),
    mean: Answer = lambda total, parts: total / parts,
    mean_of: Answer = lambda total, p, parts: (total / parts).astype(p.dtype),
    unroll: int = 1,
) -> Any:
    """Return the solution, right but for what is given; `wide`: types of the sums, None for that of the parameters."""

    def turn(total: Any, part_BD: Any) -> Any:
        found = value_and_grad(params, part_BD)
        return jax.tree.map(lambda t, one: add(t, one, parts), total, found), None

    start = jnp.zeros((), wide[0] or params["in"].dtype), jax.tree.map(lambda p: jnp.zeros_like(p, wide[1]), params)
    (loss, grads), _ = jax.lax.scan(turn, start, _parts(batch_BD, parts), unroll=unroll)
    return mean(loss, parts), jax.tree.map(lambda t, p: mean_of(t, p, parts), grads, params)


def _of_rows(rows_of: Answer) -> Answer:
    """Return the solution with other rows: `rows_of(batch_BD, rows of a part)`."""

    def accumulated(value_and_grad: Answer, params: Any, batch_BD: Any, parts: int) -> Any:
        rows_BD = rows_of(batch_BD, len(batch_BD) // parts)
        return _summed(value_and_grad, params, rows_BD, len(rows_BD) * parts // len(batch_BD))

    return accumulated


def _written_out(value_and_grad: Answer, params: Any, batch_BD: Any, parts: int) -> Any:
    found = [value_and_grad(params, part_BD) for part_BD in _parts(batch_BD, parts)]
    return jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), *found)


def _kept(value_and_grad: Answer, params: Any, batch_BD: Any, parts: int) -> Any:
    found = jax.lax.map(lambda part_BD: value_and_grad(params, part_BD), _parts(batch_BD, parts))
    return jax.tree.map(lambda a: a.astype(jnp.float32).mean(0).astype(a.dtype), found)


def _widened(value_and_grad: Answer, params: Any, *given: Any) -> Any:
    loss, grads = _summed(value_and_grad, jax.tree.map(jnp.float32, params), *given)
    return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _spied(answer: Answer, dtype: Any, rows: int, parts: int) -> tuple[Any, set[int], set[Any]]:
    """Return an answer's loss and gradients, the rows that it took at a time, and the types of its parameters."""
    seen, given = set(), set()

    def value_and_grad(params: Any, x_BD: Any) -> Any:
        seen.add(len(x_BD))
        given.update(leaf.dtype for leaf in jax.tree.leaves(params))
        return jax.value_and_grad(_loss)(params, x_BD)

    return answer(value_and_grad, *_inputs(dtype, rows), parts), seen, given


def _loss_and_gradients(answer: Answer, rows: int, parts: int) -> Any:
    found, seen, _ = _spied(answer, jnp.float32, rows, parts)
    assert isinstance(found, tuple) and len(found) == 2, "Return the loss and its gradients, as a pair."
    assert jax.tree.structure(found[1]) == jax.tree.structure({"in": 0, "out": 0}), (
        "Gradients have the structure of params."
    )
    assert answer is _whole or seen == {rows // parts}, (
        f"{rows} sequences in {parts} parts: `value_and_grad` was given {sorted(seen)} of them at a time. Then the "
        "activations of so many are alive at once."
    )
    return found


def _traced(answer: Answer, x_BD: Any, params: Any, parts: int) -> Any:
    return jax.jit(lambda p, x: answer(jax.value_and_grad(_loss), p, x, parts)).trace(params, x_BD)


def _one_loop(answer: Answer) -> None:
    params, x_BD = _inputs(jnp.float32, 12)
    found = [list(equations(_traced(answer, x_BD, params, parts).jaxpr.jaxpr)) for parts in (3, 6)]
    lengths = [sum(eqn.params.get("unroll", 1) for eqn, _ in program) for program in found]
    assert lengths[0] == lengths[1], "The program grows with the number of parts: which loop is not written out?"


def _adds_up_in_float32(answer: Answer) -> None:
    found, _, given = _spied(answer, jnp.bfloat16, 1024, 1024)
    right = jax.value_and_grad(_loss)(*jax.tree.map(jnp.float32, _inputs(jnp.bfloat16, 1024)))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found[1])), (
        "For parameters in bfloat16 the gradients come back in another type."
    )
    assert given == {jnp.dtype(jnp.bfloat16)}, (
        "For parameters in bfloat16 `value_and_grad` was given others, of another type: a second copy of all weights, "
        "and other matmuls than the model's own. Which numbers alone have to be wide?"
    )
    for what, words in ((1, "gradients are far off: in which type do you add them up?"),
                        (0, "loss is far off: in which type do you add up the losses?")):  # fmt: skip
        pairs = zip(jax.tree.leaves(found[what]), jax.tree.leaves(right[what]), strict=True)
        assert all(np.linalg.norm(np.float32(a) - b) < 0.02 * np.linalg.norm(b) for a, b in pairs), (
            f"With 1,024 parts in bfloat16 the {words} What is 256 + 1 with 8 significant bits?"
        )


def _rounds_once(answer: Answer) -> None:
    """Have whole numbers added up, operation by operation: a compiler may leave out a rounding that is asked for."""
    mean = jax.value_and_grad(lambda w, x_BD: jnp.mean(x_BD @ w["in"]).astype(jnp.float32))
    for parts in (3, 5, 48):
        x_BD = jnp.asarray(np.random.default_rng(0).integers(0, 256, (parts, 64)), jnp.bfloat16)
        with jax.disable_jit():
            _, found = answer(mean, {"in": jnp.ones(64, jnp.bfloat16)}, x_BD, parts)
        right = np.float32(x_BD).mean(0)
        off, least = (np.abs(np.float32(one) - right) for one in (found["in"], jnp.asarray(right, jnp.bfloat16)))
        assert (off <= 1.001 * least).all(), (  # of two that are equally near, either
            f"For {parts} parts in bfloat16 the gradients are not the nearest bfloat16 numbers: they were rounded on "
            "the way. Of which type is each sum, and what does the last operation read?"
        )


def _memory_stays(answer: Answer) -> None:
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in (("in", (64, 512)), ("out", (512, 2)))}
    shapes = {parts: jax.ShapeDtypeStruct((8 * parts, 64), jnp.float32) for parts in (8, 64)}
    found = [_traced(answer, x_BD, params, parts).lower().compile() for parts, x_BD in shapes.items()]
    few, many = (program.memory_analysis().temp_size_in_bytes for program in found)
    assert many < 2 * few, (
        f"The numbers are right, and the memory grows with the parts: {few:,} bytes of temporaries for 8 of eight "
        f"rows, {many:,} for 64. Which arrays have one entry for each part, and must they all be alive at once?"
    )


_TYPES = jnp.float32, jnp.float16, jnp.bfloat16

check_accumulated = Exercise(
    3,
    _whole,
    {f"12 sequences in {parts} parts": (12, parts) for parts in (3, 6)},
    "As many sequences as you like, for the memory of one part and one sum.",
    {
        "Return the loss and its gradients, as a pair.": lambda *given: _summed(*given)[1],
        "of so many are alive at once": [
            lambda *given: _whole(*given),
            lambda vg, params, batch_BD, parts: _summed(vg, params, batch_BD, len(batch_BD)),
        ],
        "That is the loss of one part: which does each turn of the loop take, and what becomes of those before?": [
            partial(_summed, add=lambda total, one, parts: parts * one),
            _of_rows(lambda x_BD, size: jnp.tile(x_BD[:size], (len(x_BD) // size, 1))),
        ],
        "Some part is left out, or taken twice. Which part does each turn of the loop take?": (
            _of_rows(lambda x_BD, size: x_BD[:-size])
        ),
        "The loss is a mean: of what, after the loop?": partial(_summed, mean=lambda total, parts: total),
        "The loss is right. It is a mean over sequences: what is its gradient, made of the parts' gradients?": (
            partial(_summed, mean_of=lambda total, p, parts: total)
        ),
        "The sums have too few digits: in which type do you add gradients up?": [
            partial(_summed, wide=(wide, narrow)) for wide in _TYPES for narrow in _TYPES[1:]
        ],
    },
    {
        _one_loop: {"grows with the number of parts": [_written_out, lambda *given: _summed(*given, unroll=given[3])]},
        _adds_up_in_float32: {
            "come back in another type": partial(_summed, mean_of=lambda total, p, parts: total / parts),
            "have to be wide": _widened,
            "in which type do you add them up": partial(_summed, wide=(jnp.float32, None)),
            "add up the losses": partial(_summed, wide=(None, jnp.float32)),
        },
        _rounds_once: {
            "Of which type is each sum": [
                partial(_summed, mean_of=lambda total, p, parts: total.astype(p.dtype) / parts),
                lambda *given: _summed(*given, wide=(jnp.float32, jnp.float32 if given[3] > 5 else None)),
                lambda f, p, x, n: _summed(
                    partial(_summed, f, parts=math.gcd(8, n), wide=[None] * 2), p, x, n // math.gcd(8, n)
                ),
            ]
        },
        _memory_stays: {"Which arrays have one entry for each part": _kept},
    },
    otherwise="The loss is a mean over all sequences: what are it and its gradient, made of the parts'?",
    ask=_loss_and_gradients,
    told=lambda found, right, *_: f"your loss is {float(found[0]):.5f}, the whole batch's {float(right[0]):.5f}.",
    rtol=1e-4,
)
