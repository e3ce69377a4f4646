"""Checks of notebook 03's exercises: layers that fit, groups, runs of equal layers, and keys for each layer."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from jaxmem.tracing.residuals import saved_residuals
from llamem_course.exercises import grade
from llamem_course.exercises.runs_of_layers import (
    TOKENS,
    WIDTH,
    check_other_trees,
    check_what_is_kept,
    count_products,
    list_of_layers,
    run_list,
    softmax_layer,
)

_DEPTH = 6


def check_layers_that_fit(fn: Callable[[int, int, int, int], int]) -> None:
    """Exercise 1: how deep a model may be, by a straight line through two compiled depths."""

    def body() -> str:
        # Bytes: room, weights of a layer, an input, what the program needs beside the inputs.
        for room, layer, one_input, workspace in (
            (80 * 2**30, 30 * 2**20, 100 * 2**20, 5000 * 2**20),
            (16 * 2**30, 116 * 2**20, 32 * 2**20, 928 * 2**20),
            (80 * 2**30, 416 * 2**20, 64 * 2**20, 3000 * 2**20),
            (10_000, 30, 400, 100),
            (10_000, 400, 30, 99),
            (3000, 100, 50, 500),  # 10 layers fill it to the last byte
        ):
            held_8, held_16 = (depth * one_input + workspace for depth in (8, 16))
            case = f"room {room:,}, a layer {layer:,}, temporaries {held_8:,} and {held_16:,} bytes"
            found = fn(room, layer, held_8, held_16)
            assert found is not None, f"{case}: return a number of layers"
            try:
                whole = int(found)
            except (TypeError, ValueError):
                raise AssertionError(f"{case}: {found!r} is not a number of layers") from None
            assert whole == found, f"{case}: {found} is not a whole number, and a part of a layer is of no use"
            right = (room - workspace) // (2 * layer + one_input)
            told = (
                ((room - workspace) // (layer + one_input), "has a layer's gradient found its room?"),
                (room // (2 * layer + one_input), "what do the temporaries hold when there are no layers at all?"),
                ((room - held_8) // (2 * layer + one_input), "the temporaries at 8 layers hold 8 inputs as well"),
                ((room - workspace) // (2 * layer), "one more layer adds something to the temporaries, too"),
                ((room - workspace) // one_input, "have the weights and their gradient found their room?"),
                (room // (2 * layer + held_16 // 16), "do temporaries grow from nothing, or from a beginning?"),
                (room // (2 * layer + held_8 // 8), "do temporaries grow from nothing, or from a beginning?"),
                (right + 1, "the last layer does not fit whole"),
                (right - 1, "one more layer would still fit, if only just"),
            )
            if whole != right:
                hint = next((hint for wrong, hint in told if whole == wrong), "")
                hint = hint or "which bytes does one more layer add, and which are there without any layer?"
                raise AssertionError(f"{case}: {whole:,} layers are too {'many' if whole > right else 'few'}; {hint}")
        return "Two compilations, and a straight line through them."

    grade(1, body)


def check_scan_runs(fn: Callable[..., Any]) -> None:
    """Exercise 3: a scan for each run of layers of equal shapes, run and looked into."""
    x_ND = jax.random.normal(jax.random.key(2), (TOKENS, WIDTH))

    def body() -> str:
        for widths in ((4,) * 5, (4, 4, 4, 7, 7, 4, 4), (4, 4, 7), (7,)):
            layers = list_of_layers(widths)
            out, want = fn(softmax_layer, list(layers), x_ND), run_list(softmax_layer, layers, x_ND)
            told = f"for layers of the widths {widths}"
            assert getattr(out, "shape", None) == x_ND.shape, (
                f"{told}: return x as the last layer leaves it, one array of x's shape; a scan returns a pair, "
                "(carry, outputs)"
            )
            by_width = sorted(layers, key=lambda w: widths.index(w["up"].shape[1]))
            assert np.allclose(out, want, atol=1e-5) or not np.allclose(
                out, run_list(softmax_layer, by_width, x_ND), atol=1e-5
            ), f"{told} yours runs equal layers together although others stand between them. Which are neighbours?"
            assert np.allclose(out, want, atol=1e-5), (
                f"{told} the result is not that of a Python loop: is each used once, from first to last, and as it is, "
                "without zeros that fill it up?"
            )
            gradients = [
                jax.grad(lambda w, x, run=run: jnp.sum(run(softmax_layer, w, x) ** 2), (0, 1))(layers, x_ND)
                for run in (fn, run_list)
            ]
            assert _close(*gradients), (
                f"{told} the result is right, and a gradient of weights or x is not: is one lost?"
            )
        try:
            same = np.array_equal(fn(softmax_layer, [], x_ND), x_ND)
        except (IndexError, TypeError, ValueError):
            same = False
        assert same, "of no layers at all there is no run, and x comes out as it went in: does yours need a first one?"
        check_other_trees(fn)

        few, many = list_of_layers((4, 4, 7, 7)), list_of_layers((4,) * 6 + (7,) * 9)
        check_what_is_kept(fn, many, x_ND)
        check_what_is_kept(fn, list_of_layers((4, 7) * 4), x_ND)  # runs of one layer each
        assert count_products(fn, few, x_ND) == count_products(fn, many, x_ND), (
            "the program grows with the layers, where the runs are as many: each layer is written into it. Which "
            "function of jax.lax writes it once, and does anything unroll that?"
        )
        _assert_only_the_last(lambda w: fn(softmax_layer, w, x_ND), few[:2], 2 * x_ND.size)
        return "A program as long as its runs, and of each layer its input alone."

    grade(3, body)


def check_best_groups(fn: Callable[[int, int, int], int]) -> None:
    """Exercise 2: groups of a nested scan, by the formula."""

    def held(n_layers: int, groups: int, x: int, w: int) -> int:
        return (groups + n_layers // groups) * x + 2 * (n_layers // groups) * w

    def body() -> str:
        for n_layers, x, w in (
            (64, 128, 116),
            (64, 8, 116),
            (36, 100, 1),
            (12, 7, 9),
            (80, 1000, 60),
            (7, 5, 5),
            (7, 5, 1),
            (28, 102, 748),
        ):
            case = f"{n_layers} layers, inputs of {x} and weights of {w} bytes"
            try:
                found = fn(n_layers, x, w)
            except ValueError as error:  # such as that of an empty search
                raise AssertionError(
                    f"{case}: {error}. Every depth has two divisors at least: are both among those you search?"
                ) from None
            try:
                found = operator.index(found)
            except TypeError:
                raise AssertionError(
                    f"{case}: {found!r} is not of an integer type. A number of groups counts; `//` divides integers"
                ) from None
            if found < 1 or n_layers % found:
                raise AssertionError(f"{found} does not divide {n_layers}: all groups need the same number of layers.")
            divisors = [g for g in range(1, n_layers + 1) if n_layers % g == 0]
            costs = {g: held(n_layers, g, x, w) for g in divisors}
            if costs[found] == min(costs.values()):
                continue
            least = min(costs, key=lambda g: costs[g])
            if {found, least} == {1, n_layers}:
                raise AssertionError(
                    f"{case}: you say {found}. 1 and L are allowed: what does the formula say for both?"
                )
            if costs[n_layers // found] == costs[least]:
                raise AssertionError(f"{case}: {found} is the number of layers in a group. How many groups is that?")
            if held(n_layers, found, w, x) == min(held(n_layers, g, w, x) for g in divisors):
                raise AssertionError(f"{case}: {found} is right for inputs of {w} and weights of {x}. Which is which?")
            if found + n_layers // found == min(g + n_layers // g for g in divisors):
                raise AssertionError(f"{case}: {found} keeps fewest inputs. What else does a group at work hold twice?")
            raise AssertionError(f"{case}: by the formula {found} groups hold {costs[found]}; less is possible.")
        return "Not the square root: heavy weights want more groups, each of fewer layers."

    grade(2, body)


def check_dropout_stack(fn: Callable[..., Any]) -> None:
    """Exercise 4: a scanned, rematerialised stack in which every layer draws its own random numbers."""
    w = _weights(_DEPTH) | {"bit": 2.0 ** jnp.arange(_DEPTH)}
    x_ND = jax.random.normal(jax.random.key(5), (40, WIDTH))

    def marked(w: Any, x_ND: Any, key: Any) -> Any:  # the sum tells which layer drew what
        return x_ND + w["bit"] * jax.random.bernoulli(key, 0.5, x_ND.shape)

    def noisy(w: Any, x_ND: Any, key: Any) -> Any:
        return _layer(w, x_ND) * jax.random.bernoulli(key, 0.5, x_ND.shape)

    used_twice = (
        "a key is used twice: by two splits, or by a layer's draw and a split. Then what is drawn and what is drawn "
        "later hang together. Split a key once, and hand on what nobody draws from."
    )

    def masks(seed: int) -> np.ndarray:
        out = fn(marked, w, jnp.zeros((40, WIDTH)), jax.random.key(seed))
        assert getattr(out, "shape", None) == x_ND.shape, (
            "return x as the last layer leaves it, one array of x's shape; a scan returns a pair, (carry, outputs)"
        )
        total = np.asarray(out)
        assert np.all(total == np.round(total)) and total.max() < 2**_DEPTH, (
            "some layers ran more than once in a forward pass, or with the weights of others"
        )
        return (total.astype(int)[None] >> np.arange(_DEPTH)[:, None, None]) & 1

    def body() -> str:
        drawn = masks(3)
        assert len(np.unique(drawn.reshape(_DEPTH, -1), axis=0)) == _DEPTH, (
            "two layers drew the same mask. How does a scan hand something of its own to each turn of the loop?"
        )
        assert 0.2 < drawn.mean() < 0.8, "each layer must be used once, with its own weights"
        other = masks(4)
        assert not np.array_equal(drawn, other), "another key gives the same masks: your answer does not use its key"
        assert len(np.unique(np.concatenate([drawn, other]).reshape(2 * _DEPTH, -1), axis=0)) == 2 * _DEPTH, (
            "a layer draws with one key what its neighbour draws with the next: numbers that are added to a key give "
            "the masks of other steps. Which functions of jax.random make new keys?"
        )
        keys = jax.random.split(jax.random.key(7), 60)
        many = jax.vmap(lambda key: fn(marked, w, jnp.zeros((40, WIDTH)), key))(keys).astype(int)
        of_layers = (np.asarray(many)[:, None] >> np.arange(_DEPTH)[:, None, None]) & 1
        assert len(np.unique(of_layers.reshape(60 * _DEPTH, -1), axis=0)) == 60 * _DEPTH, (
            f"among the {60 * _DEPTH} masks of 60 steps some are the same: your keys are made of few numbers, which "
            "come again. Which functions of jax.random make new keys of a whole key?"
        )
        of_the_key = jax.random.bernoulli(jax.random.key(3), 0.5, x_ND.shape)
        assert not any(np.array_equal(mask, of_the_key) for mask in drawn), used_twice
        assert np.array_equal(drawn, masks(3)), "the same key must give the same masks, or nothing can be repeated"

        def answer(w: Any, x_ND: Any) -> Any:
            return jnp.sum(fn(noisy, w, x_ND, jax.random.key(3)) ** 2)

        deep = {name: jnp.concatenate([leaf] * 4) for name, leaf in w.items()}
        assert len({_lines(lambda w: answer(w, x_ND), weights) for weights in (w, deep)}) == 1, (
            "the lowered program grows with depth: the text asks for a scan, and keys are made for all layers at once"
        )
        try:
            with jax.debug_key_reuse(True):
                masks(3)
        except jax.errors.KeyReuseError:
            raise AssertionError(used_twice) from None

        def reference(w: Any, x_ND: Any) -> Any:
            for i in range(_DEPTH):
                x_ND = _layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x_ND) * drawn[i]
            return jnp.sum(x_ND**2)

        found, expected = (jax.value_and_grad(f, (0, 1))(w, x_ND) for f in (answer, reference))
        assert _close(found, expected), (
            "with these masks the result, or a gradient, is not that of a Python loop over the layers from first to "
            "last: are the weights those of the layer that draws the mask, and does every gradient arrive?"
        )
        rows = saved_residuals(lambda w: answer(w, x_ND), w).rows
        kept = sum(row.bytes for row in rows if not row.argument)
        assert kept <= 1.5 * (_DEPTH + 1) * x_ND.nbytes, (
            "more than the layers' inputs is kept, masks among it: they can be drawn again from their keys"
        )
        assert kept >= _DEPTH * x_ND.nbytes, (
            "fewer inputs are kept than there are layers: the checkpoint stands around the loop, or around several "
            "layers, and not around each"
        )
        _assert_only_the_last(lambda w: fn(noisy, w, x_ND, jax.random.key(3)), w, _DEPTH * x_ND.size)
        return "Keys are inputs of the scan; the recomputation draws the same masks from them."

    grade(4, body)


def _assert_only_the_last(program: Callable[..., Any], w: Any, size: int) -> None:
    """Raise AssertionError where a scan of the program returns an array as large as all layers' results."""
    equations_of = equations(jax.make_jaxpr(program)(w).jaxpr)
    of_scans: list[Any] = [out.aval for eqn, _ in equations_of if eqn.primitive.name == "scan" for out in eqn.outvars]
    assert all(np.prod(one.shape) < size for one in of_scans), (
        "the scan writes down what every layer returns, an array with the layers first, and only the last is wanted. "
        "Which of the two things that a scan returns is the x of the last turn?"
    )


def _layer(w: Any, x_ND: Any) -> Any:
    return x_ND + jnp.sin(jnp.tanh(x_ND @ w["up"])) @ w["down"]


def _weights(depth: int) -> dict[str, Any]:
    up, down = (jax.random.normal(jax.random.key(i), (depth, WIDTH, WIDTH)) for i in (0, 1))
    return {"up": up, "down": down / 2}


def _close(found: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)


def _lines(loss: Callable[..., Any], w: Any) -> int:
    """How many lines the lowered program of a gradient has: a loop that is unrolled there grows with its layers."""
    return jax.jit(jax.grad(loss)).lower(w).as_text().count("\n")
