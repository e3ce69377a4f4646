"""Checks of the exercises of notebook 07."""

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem_course.exercises import grade
from llamem_course.exercises.fresh import ask_afresh, freeze

# Epochs and seeds that a recipe of one number, such as 1000 * seed + epoch, maps to the same order.
_FAR = 2, 3, 10, 100, 1000, 10_000, 100_000, 1_000_000


def check_inputs_and_targets(fn: Callable[..., Any]) -> None:
    """Exercise 1: of a chat, inputs and the tokens that follow them, of which only the assistant's count."""

    def body() -> str:
        for ids, wrote in (
            ([11, 12, 13, 14, 15, 16, 17], [0, 0, 0, 1, 1, 1, 0]),
            ([21, 22, 23, 24, 25, 22, 27, 28, 29], [0, 0, 1, 1, 0, 0, 0, 1, 1]),
            ([5, 0, 7, 0], [0, 1, 0, 1]),
        ):
            ids, wrote = np.asarray(ids), np.asarray(wrote, bool)
            found = fn(ids.copy(), wrote.copy())
            assert isinstance(found, tuple | list) and len(found) == 2, "Return inputs and targets, as a pair."
            inputs, targets = (np.asarray(part) for part in found)
            told = f"ids {ids.tolist()}, wrote {wrote.astype(int).tolist()}"
            for name, part in (("inputs", inputs), ("targets", targets)):
                assert part.shape == (len(ids) - 1,), (
                    f"{told}: your {name} have the shape {part.shape}. A chat of {len(ids)} tokens has "
                    f"{len(ids) - 1} places at which a next token is known."
                )
            assert np.array_equal(inputs, ids[:-1]), (
                f"{told}: your inputs are {inputs.tolist()}. The model reads every token but the last, the user's and "
                "the assistant's alike, since an answer depends on the question."
            )
            right = np.where(wrote, ids, -100)[1:]
            assert not np.array_equal(targets, np.where(wrote[:-1], ids[1:], -100)) or np.array_equal(right, targets), (
                f"{told}: your targets are {targets.tolist()}. They are the right tokens, and the marks are one place "
                "off: is it who wrote the input that counts, or who wrote the token that is to be predicted?"
            )
            assert not np.array_equal(targets, np.where(wrote, ids, -100)[:-1]), (
                f"{told}: your targets are {targets.tolist()}. Each is its own input: what has a model to learn in "
                "order to repeat what it reads?"
            )
            counted = targets != -100
            assert not counted.all(), f"{told}: every target counts. Whose words should the model learn to write?"
            assert np.array_equal(counted, wrote[1:]), (
                f"{told}: your targets are {targets.tolist()}. Which of the tokens that come next did the assistant "
                "write? All others are -100."
            )
            assert np.array_equal(targets, right), (
                f"{told}: your targets are {targets.tolist()}. The right places count; which token comes after each?"
            )
        return "The model reads the whole chat, and learns only to write its own part."

    grade(1, body)


def check_order(fn: Callable[..., Any]) -> None:
    """Exercise 2: the sequences of a step, as a function of step, seed and sizes alone."""
    try:
        untouched: bytes | TypeError = freeze(fn)  # before it is asked anything
    except TypeError as error:
        untouched = error

    def read(steps: Any, seed: int, count: int, batch_size: int) -> list[int]:
        """Return the numbers of the sequences that steps read, one after the other."""
        numbers: list[int] = []
        for step in steps:
            batch = np.asarray(fn(step, seed, count, batch_size))
            assert batch.shape == (batch_size,), (
                f"Step {step} should read {batch_size} sequences, one number for each; yours has the shape "
                f"{batch.shape}. What does a batch do where an epoch ends?"
            )
            assert batch.dtype.kind in "iu" and batch.min() >= 0 and batch.max() < count, (
                f"Sequences are numbered from 0 to {count - 1}, in whole numbers; step {step} reads {batch.tolist()}."
            )
            numbers += batch.tolist()
        return numbers

    def epochs(seed: int, count: int, batch_size: int) -> list[list[int]]:
        """Return the orders of the first two epochs, each of which must have every sequence once."""
        numbers = read(range(-(-2 * count // batch_size)), seed, count, batch_size)
        orders = [numbers[:count], numbers[count : 2 * count]]
        for name, order in zip(("first", "second"), orders, strict=True):
            missing = sorted(set(range(count)) - set(order))
            assert not missing, (
                f"{count} sequences, {batch_size} in a batch: among the {name} {count} that are read, {missing[0]} is "
                "missing and others come twice. Of which order are the batches of one epoch consecutive parts, and "
                "where does the next begin?"
            )
        return orders

    def alike(one: list[int], other: list[int]) -> bool:
        """Whether most neighbours of one order are neighbours in another, or most numbers moved by one amount."""
        pairs = [{frozenset(pair) for pair in itertools.pairwise(order)} for order in (one, other)]
        moved = collections.Counter((b - a) % len(one) for a, b in zip(one, other, strict=True))
        return max(len(pairs[0] & pairs[1]), *moved.values()) > len(one) // 2

    def check_apart() -> None:
        """Raise AssertionError where two epochs of seeds 0 and 1, or of seeds far apart, have one order."""
        seen: dict[tuple[int, ...], tuple[int, int]] = {}
        for seed, epoch in [(s, e) for s in (0, 1) for e in (0, 1, *_FAR)] + [(s, e) for s in _FAR for e in (0, 1)]:
            order = tuple(read([epoch], seed, 12, 12))
            other = seen.setdefault(order, (seed, epoch))
            assert other == (seed, epoch), (
                f"Epoch {epoch:,} of seed {seed:,} has the order of epoch {other[1]:,} of seed {other[0]:,}: what "
                "should be independent reads the same. How do two numbers become one seed without meeting?"
            )

    def check_a_new_process() -> None:
        """Raise AssertionError where a new Python, asked for later steps first, reads other sequences."""
        if isinstance(untouched, TypeError):
            raise AssertionError(
                f"Your answer could not be asked in a new Python, as after a restart: {untouched}. Write it as a plain "
                "function of its four arguments."
            )
        calls = [(step, seed, 60, 4) for step, seed in ((22, 1), (22, 0), (16, 0), (7, 0), (2, 0), (2, 1))]
        here = [read([step], seed, count, batch_size) for step, seed, count, batch_size in calls]
        try:
            there = [np.asarray(batch).tolist() for batch in ask_afresh(untouched, calls)]
        except RuntimeError as error:
            raise AssertionError(
                f"In a new Python, as after a restart, your answer ends in {error}. What does it need beside its four "
                "arguments?"
            ) from None
        for (step, seed, *_), own, fresh in zip(calls, here, there, strict=True):
            assert own == fresh, (
                f"Step {step} of seed {seed} reads {own} here and {fresh} in a new Python, which was asked for late "
                "steps first. A run that goes on after a restart is such a process. What do your orders depend on that "
                "differs from process to process, or that was kept between calls?"
            )

    def body() -> str:
        for count, batch_size in ((60, 4), (10, 4), (3, 8)):
            epochs(0, count, batch_size)
        (first, second), (other, _) = epochs(0, 60, 4), epochs(1, 60, 4)
        assert not alike(first, list(range(60))), "The sequences come as they lie in the data: where are they shuffled?"
        steps = (7, 2, 14, 2)
        once = [read([step], 0, 60, 4) for step in steps]
        assert once[1] == once[3] and once == [first[4 * step : 4 * step + 4] for step in steps], (
            "Steps 7, 2, 14 and again 2 were asked for: what a step reads depends on what was asked before. What is "
            "left of that after a restart?"
        )
        assert not alike(first, second), (
            "The second epoch has the order of the first, or most of it: what should the order depend on, beside the "
            "seed?"
        )
        assert not alike(first, other), "Seeds 0 and 1 give one order, or nearly so: where does the seed come in?"
        assert second != other, (
            "The second epoch of seed 0 is the first of seed 1: two runs that should be independent read the same. How "
            "do two numbers become one seed without meeting?"
        )
        shuffled = {tuple(read(range(2), seed, 8, 4)) for seed in range(40)}
        assert len(shuffled) > 30, "Over 40 seeds few orders come: how many are there of eight sequences?"
        near, far = (min(_seconds(fn, step, 0, 10, 4) for _ in range(3)) for step in (0, 200_000))
        assert far < 20 * near + 0.02, (
            f"Step 200,000 takes {far:.2f} s: is every epoch before it shuffled again? What does one order need?"
        )
        check_apart()
        check_a_new_process()
        return "Seed and epoch make the order, the step a place in it: a run that was killed has lost nothing."

    grade(2, body)


def _seconds(fn: Callable[..., Any], *args: int) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def check_accumulated(fn: Callable[..., Any]) -> None:
    """Exercise 3: the gradients of a large batch from parts of it, added up in f32 inside one loop."""

    def loss(params: Any, x_BD: Any) -> Any:
        return jnp.mean(jnp.tanh(x_BD @ params["in"]) @ params["out"]).astype(jnp.float32)

    def inputs(dtype: Any, rows: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(0), 3)
        params = {"in": jax.random.normal(keys[0], (4, 8), dtype), "out": jax.random.normal(keys[1], (8, 2), dtype)}
        return params, 1 + jax.random.normal(keys[2], (rows, 4), dtype) / 4

    def of_one_part(parts: int) -> Any:
        params, x_BD = inputs(jnp.float32, 12)
        return np.array([loss(params, part) for part in jnp.split(x_BD, parts)])

    def answer(dtype: Any, rows: int, parts: int) -> tuple[Any, Any, set[int], int]:
        """Return what comes out, what should, the rows it took at a time, and the length of the program."""
        params, x_BD = inputs(dtype, rows)
        seen = set()

        def spied(params: Any, x_BD: Any) -> Any:
            seen.add(len(x_BD))
            given.update(leaf.dtype for leaf in jax.tree.leaves(params))
            return jax.value_and_grad(loss)(params, x_BD)

        found = fn(spied, params, x_BD, parts)
        program = jax.jit(lambda params, x_BD: fn(spied, params, x_BD, parts)).lower(params, x_BD)
        length = program.as_text().count("\n")  # unlike a jaxpr's, an unrolled scan's text is long
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
        return found, jax.value_and_grad(loss)(wide, x_BD.astype(jnp.float32)), seen, length

    def is_rounded_once(parts: int) -> bool:
        """Whether whole numbers, which bf16 holds, are added up and divided to the nearest bf16 numbers.

        Operation by operation: a compiler may leave out a rounding that the program asks for.
        """
        x_BD = jnp.asarray(np.random.default_rng(0).integers(0, 100, (parts, 64)), jnp.bfloat16)
        mean = jax.value_and_grad(lambda w_D, x_BD: jnp.mean(x_BD @ w_D).astype(jnp.float32))
        with jax.disable_jit():
            _, found_D = fn(mean, jnp.ones(64, jnp.bfloat16), x_BD, parts)
        return bool((found_D == jnp.mean(x_BD.astype(jnp.float32), 0).astype(jnp.bfloat16)).all())

    def answer_memory(parts: int) -> int:
        """Return the bytes of temporaries, with parameters that are large beside the batch."""
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("in", (64, 512)), ("out", (512, 2)))
        }
        x_BD = jax.ShapeDtypeStruct((8 * parts, 64), jnp.float32)
        program = jax.jit(lambda params, x_BD: fn(jax.value_and_grad(loss), params, x_BD, parts))
        analysis = program.lower(params, x_BD).compile().memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    given: set[Any] = set()  # the types of the parameters that `value_and_grad` was called with

    def body() -> str:
        lengths = []
        for parts in (2, 6):
            found, right, seen, length = answer(jnp.float32, 12, parts)
            lengths.append(length)
            assert isinstance(found, tuple) and len(found) == 2, "Return the loss and its gradients, as a pair."
            assert jax.tree.structure(found) == jax.tree.structure(right), "Gradients have the structure of params."
            assert seen == {12 // parts}, (
                f"12 sequences in {parts} parts: `value_and_grad` was given {sorted(seen)} of them at a time. Then the "
                "activations of so many are alive at once."
            )
            assert not np.isclose(found[0], of_one_part(parts), rtol=1e-5).any(), (
                f"The loss is not that of the whole batch, but of one of {parts} parts: which part does each turn of "
                "the loop take, and what becomes of those before?"
            )
            assert np.allclose(found[0], right[0], rtol=1e-4), (
                f"The loss of {parts} parts is not that of the whole batch. It is a mean: of what, after the loop?"
            )
            assert all(np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in _pairs(found[1], right[1])), (
                f"The loss is right and the gradients of {parts} parts are not those of the whole batch. The loss is a "
                "mean over sequences: what is its gradient, made of the parts' gradients?"
            )
        assert lengths[0] == lengths[1], "The program grows with the number of parts: which loop is not written out?"
        given.clear()
        found, right, _, _ = answer(jnp.bfloat16, 1024, 1024)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found[1])), (
            "For parameters in bfloat16 the gradients come back in another type."
        )
        assert given == {jnp.dtype(jnp.bfloat16)}, (
            "For parameters in bfloat16 `value_and_grad` was given others, of another type: a second copy of all "
            "weights, and other products than the model's own. Which numbers alone have to be wide?"
        )
        errors = [np.linalg.norm(np.float32(a) - b) / np.linalg.norm(b) for a, b in _pairs(found[1], right[1])]
        assert max(errors) < 0.02, (
            "With 1,024 parts in bfloat16 the gradients are far off: in which type do you add them up? What is 256 + 1 "
            "with 8 significant bits?"
        )
        assert is_rounded_once(36), (
            "The gradients are added up well, and for 36 parts in bfloat16 they are not the nearest bfloat16 numbers: "
            "they were rounded before the last operation. Which one is that, and of which type is what it reads?"
        )
        assert abs(found[0] - right[0]) < 0.02 * abs(right[0]), (
            "With 1,024 parts in bfloat16 the gradients are right and the loss is far off: in which type do you add up "
            "the losses?"
        )
        few, many = (answer_memory(parts) for parts in (8, 64))
        assert many < 2 * few, (
            f"The numbers are right, and the memory grows with the parts: {few:,} bytes of temporaries for 8 of eight "
            f"rows, {many:,} for 64. Which arrays have one entry for each part, and must they all be alive at once?"
        )
        return "As many sequences as you like, for the memory of one part and one sum."

    grade(3, body)


def _pairs(a: Any, b: Any) -> Any:
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
