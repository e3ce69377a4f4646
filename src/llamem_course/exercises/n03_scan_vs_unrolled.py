"""The exercises of notebook 03."""

import itertools
import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from jaxmem.tracing.residuals import saved_residuals
from llamem.layers.stack import apply_stack
from llamem_course.exercises.exercise import Answer, Exercise, quickly

MiB = 2**20


def _temporaries(one_input: int, workspace: int, room_elsewhere: int = 0, at_once: int = 1) -> Answer:
    """Return what a compiler says of each depth: inputs cost nothing until they no longer find room elsewhere."""

    def held(n: int) -> int:
        inputs = n // at_once * at_once * one_input
        return workspace + (inputs if inputs > room_elsewhere else 0)

    return held


def _deepest(room: int, layer: int, temporaries: Answer, copies: int = 2) -> int:
    return next(n - 1 for n in itertools.count(1) if copies * n * layer + temporaries(n) > room)


def _by_line(room: int, layer: int, temporaries: Answer, *, start: bool = True, first: int = 8) -> int:
    slope = (temporaries(2 * first) - temporaries(first)) / first
    return int((room - start * (temporaries(first) - first * slope)) // (2 * layer + slope))


def _layers(answer: Answer, *given: Any) -> Any:
    found = answer(*given)
    try:
        whole = int(found)
    except (TypeError, ValueError):
        whole = None
    assert whole == found, f"{found!r} is not a whole number of layers, and a part of a layer is of no use."
    return whole


def _few_compilations(answer: Answer) -> None:
    asked = []
    held = _temporaries(16 * MiB, 462 * MiB, 501 * MiB)
    answer(64 * 2**30, 60 * MiB, lambda n: asked.append(n) or held(n))
    assert len(asked) <= 24, (
        f"you compiled {len(asked)} depths, and each takes seconds. More layers never need less: how do you find a "
        "page in a book whose pages are numbered?"
    )


check_layers_that_fit = Exercise(
    1,
    _deepest,
    {
        "A large chip": (80 * 2**30, 116 * MiB, _temporaries(256 * MiB, 3000 * MiB)),
        "A small chip": (16 * 2**30, 116 * MiB, _temporaries(32 * MiB, 928 * MiB)),
        "Small layers, large inputs": (10_000, 30, _temporaries(400, 100)),
        "Many small layers": (200_000, 30, _temporaries(400, 100)),
        "Not one layer fits": (3000, 1600, _temporaries(50, 500)),
        "Ten layers fill the room to the last byte": (3000, 100, _temporaries(50, 500)),
        "Inputs of 24 layers find room elsewhere": (2**32, 50 * MiB, _temporaries(16 * MiB, 462 * MiB, 400 * MiB)),
        "Room for inputs is set aside eight at a time": (8800, 50, _temporaries(400, 100, at_once=8)),
    },
    "You asked the compiler, and drew no line through two answers.",
    {
        "Has a layer's gradient found its room?": partial(_deepest, copies=1),
        "Have the weights and their gradient found their room?": partial(_deepest, copies=0),
        "One more layer adds something to the temporaries, too.": (
            lambda room, layer, held: (room - held(1)) // (2 * layer)
        ),
        "What do the temporaries hold when there are no layers at all?": [
            partial(_by_line, start=False),
            lambda room, layer, held: room // (2 * layer + held(16) // 16),
        ],
        "The temporaries at 8 layers hold 8 inputs as well.": (
            lambda room, layer, held: int((room - held(8)) // (2 * layer + (held(16) - held(8)) / 8))
        ),
        "The last layer does not fit whole.": lambda *given: _deepest(*given) + 1,
        "One more layer would still fit, if only just.": lambda *given: _deepest(*given) - 1,
        "layers are too many": lambda *given: max(1, _deepest(*given)),
        "A line through two depths? Look at the temporaries of more of them.": [
            partial(_by_line, first=depth) for depth in (1, 8, 16, 32, 64, 1000)
        ],
        "How many layers would fit if they needed nothing but weights and gradients?": (
            lambda *given: min(_deepest(*given), 255)
        ),
        "a part of a layer is of no use": [
            lambda room, layer, held: (room - 2 * held(8) + held(16)) / (2 * layer + (held(16) - held(8)) / 8),
            lambda *given: "as many as can be",
        ],
    },
    {_few_compilations: {"each takes seconds": _deepest}},
    otherwise="Which bytes does one more layer add, and which are there without any layer?",
    ask=_layers,
    told=lambda got, right, *_: f"{got:,} layers are too {'many' if got > right else 'few'}.",
)


def _held(groups: int, n_layers: int, x: float, w: float, **options: float) -> float:
    if groups == n_layers:  # the plain scan
        return n_layers * x
    return _nested(groups, n_layers, x, w, **options)


def _nested(groups: int, n_layers: int, x: float, w: float, copies: float = 2, fewer: float = 0) -> float:
    return (groups + n_layers // groups - fewer) * x + copies * (n_layers // groups) * w


def _divisors(n: int) -> list[int]:
    return [g for g in range(2, n + 1) if n % g == 0]


def _least(n: int, x: float, w: float, among: Answer = _divisors, **options: float) -> int:
    return min(among(n), key=lambda groups: _held(groups, n, x, w, **options))


def _bytes_held(answer: Answer, n_layers: int, x: float, w: float) -> float:
    found = answer(n_layers, x, w)
    try:
        groups = operator.index(found)
    except TypeError:
        raise AssertionError(f"{found!r} is not of an integer type; `//` divides integers.") from None
    assert groups >= 1 and n_layers % groups == 0, (
        f"{groups} does not divide {n_layers}: all groups need the same number of layers."
    )
    assert groups > 1, "One group is the plain scan, run once more for nothing. What is returned for the plain scan?"
    return _held(groups, n_layers, x, w)


check_best_groups = Exercise(
    2,
    _least,
    {
        f"{n} layers, inputs of {x} and weights of {w} bytes": (n, x, w)
        for n, x, w in (
            (24, 100, 150),
            (30, 20, 25),
            (60, 100, 96),
            (64, 128, 116),
            (100, 3, 10),
            (36, 20, 60),
            (32, 29, 46),
            (7, 5, 5),
            (28, 102, 748),
            (16, 32, 96),
            (16, 20, 32),
            (4, 100, 10),
        )
    },
    "Not the square root: heavy weights want more groups, each of fewer layers.",
    {
        "That is the number of layers in a group. How many groups is it?": lambda n, x, w: n // _least(n, x, w),
        "Which of the two sizes is the input's, and which the weights'?": lambda n, x, w: _least(n, w, x),
        "These keep the fewest inputs. What else does a group at work hold twice?": [
            lambda n, x, w: _least(n, x, 0),
            lambda n, x, w: min(_divisors(n), key=lambda g: abs(g - 8)),
        ],
        "What does a group at work hold twice, its weights or something else?": partial(_least, copies=1),
        "Which holds less, any of these groups or the plain scan?": (
            partial(_least, among=lambda n: _divisors(n)[:-1] or [n])
        ),
        "Does anything lie twice in a plain scan?": (
            lambda n, x, w: min(_divisors(n), key=lambda groups: _nested(groups, n, x, w))
        ),
        "Are powers of two the only numbers that divide a depth?": (
            partial(_least, among=lambda n: [g for g in (1, 2, 4, 8, 16, 32, 64) if n % g == 0])
        ),
        "The root of a formula falls between two divisors. Which of them holds less?": [
            lambda n, x, w: min(_divisors(n), key=lambda g: abs(g - (n * (1 + 2 * w / x)) ** 0.5)),
            lambda n, x, w: max(g for g in _divisors(n) if g * g <= n * (1 + 2 * w / x)),
            lambda n, x, w: min([g for g in _divisors(n) if g * g >= n * (1 + 2 * w / x)], default=n),
        ],
        "Copies of weights grow with the layers in a group, not with the number of groups.": (
            lambda n, x, w: min(_divisors(n), key=lambda g: (g + n // g) * x + 2 * g * w)
        ),
        "How many inputs do four groups of four layers hold by the formula?": partial(_least, fewer=1),
        "One group is the plain scan": lambda n, x, w: 1,
        "does not divide": lambda n, x, w: n + 1,
        "not of an integer type": lambda n, x, w: n**0.5,
    },
    otherwise="Write the formula down for each number that divides the depth.",
    ask=_bytes_held,
    told=lambda got, *_: f"your groups hold {got:,.0f} bytes, and less is possible.",
    rtol=1e-9,
)

_TOKENS, _WIDTH = 5, 3
_X_ND = jax.random.normal(jax.random.key(2), (_TOKENS, _WIDTH))


def _layer(w: Any, x_ND: Any) -> Any:
    """Apply a layer in which zeros that fill up its weights would count."""
    return x_ND + jax.nn.softmax(jnp.sin(x_ND @ w["up"])) @ w["down"]


def _affine(w: Any, x_ND: Any) -> Any:
    return x_ND * w[0] + w[1][0]


def _of_widths(*widths: int) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(6), (len(widths), 2))
    return [
        {"up": jax.random.normal(up, (_WIDTH, width)), "down": jax.random.normal(down, (width, _WIDTH))}
        for (up, down), width in zip(keys, widths, strict=True)
    ]


def _of_other_trees() -> list[Any]:
    """Neighbours that are alike in their first array, or in the sum, the set or the list of their sizes."""
    many, one, row = (_WIDTH,), (1,), (1, _WIDTH)
    pairs = ((many, one), (one, many), (one, many), (many, many), (row, many), (many, row), (many, one))
    return [[jnp.full(gain, i + 1.0), (jnp.full(shift, i + 2.0),)] for i, (gain, shift) in enumerate(pairs)]


def _in_its_type(w: Any, x_ND: Any) -> Any:
    """Apply a layer that computes in the type of its weights."""
    return x_ND + jnp.sin(x_ND.astype(w.dtype) * w).astype(x_ND.dtype)


def _of_types(*types: str) -> list[Any]:
    return [jnp.full(_WIDTH, 1 + 1 / (3 + i), dtype) for i, dtype in enumerate(types)]


def _loop(layer: Answer, layers: Iterable[Any], x: Any) -> Any:
    for w in layers:
        x = layer(w, x)
    return x


def _result_and_gradients(answer: Answer, layer: Answer, layers: list[Any]) -> Any:
    def squared(layers: Any, x_ND: Any) -> Any:
        out = answer(layer, list(layers), x_ND)
        assert getattr(out, "shape", None) == x_ND.shape, (
            "return x as the last layer leaves it, one array; a scan returns a pair, (carry, outputs)."
        )
        return jnp.sum(out**2), out

    try:
        return quickly(jax.value_and_grad(squared, (0, 1), has_aux=True))(layers, _X_ND)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        ask = "Are all shapes of two layers compared? Is a name of weights written into it?"
        ask = ask if layers else "Does it need a first layer?"
        raise AssertionError(f"yours fails: {type(error).__name__}: {str(error).rstrip('.')}. {ask}") from None


def _kept(answer: Answer) -> None:
    """Raise AssertionError unless each layer's input is kept, and nothing more."""
    for widths in ((4,) * 6 + (7,) * 9, (4, 7) * 4):
        layers = _of_widths(*widths)
        rows = saved_residuals(lambda w: jnp.sum(answer(_layer, w, _X_ND)), layers).rows
        kept = [row for row in rows if not row.argument]
        inner = [row for row in kept if row.shape[-2:] in ((_TOKENS, 4), (_TOKENS, 7))]
        inputs = sum(row.bytes for row in kept if row.shape[-2:] == _X_ND.shape) / _X_ND.nbytes
        assert not inner and inputs < len(layers) + 3, (
            f"of layers of the widths {widths} more than their inputs is kept for the backward pass. Is there a "
            "checkpoint around the layer, in a run of one as well?"
        )
        assert inputs > len(layers) - 2, (
            f"of layers of the widths {widths} fewer inputs are kept than there are layers. So several are run again "
            "at once, a whole run or a group of one: what is there at once then?"
        )


def _loops_are_loops(answer: Answer) -> None:
    def products(layers: Any) -> tuple[int, int]:
        gradient = jax.grad(lambda w: jnp.sum(answer(_layer, w, _X_ND)))
        traced = equations(jax.make_jaxpr(gradient)(layers).jaxpr)
        lowered = jax.jit(gradient).lower(layers).as_text()
        written = lowered.count("dot_general") + lowered.count("call @")
        return sum(eqn.primitive.name == "dot_general" for eqn, _ in traced), written

    # Depths that 2, 3 and 4 divide: a loop that takes some turns at once is one as well.
    few, many = _of_widths(*(4,) * 12 + (7,) * 12), _of_widths(*(4,) * 24 + (7,) * 12)
    assert products(few) == products(many), (
        "the program grows with the layers, where the runs are as many: each layer is written into it. Which function "
        "of jax.lax writes it once, and does anything unroll that?"
    )


def _only_the_last(answer: Answer) -> None:
    program = jax.make_jaxpr(lambda w: answer(_layer, w, _X_ND))(_of_widths(4, 4)).jaxpr
    scans = (eqn for eqn, _ in equations(program) if eqn.primitive.name == "scan")
    of_scans: list[Any] = [out.aval for scan in scans for out in scan.outvars]
    assert all(np.prod(one.shape) < 2 * _X_ND.size for one in of_scans), (
        "the scan writes down what every layer returns, and only the last is wanted. Which of the two things that a "
        "scan returns is the x of the last turn?"
    )


def _shapes(w: Any) -> Any:
    return jax.tree.map(jnp.shape, w)


def _shapes_and_types(w: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), w)


def _sizes(w: Any) -> list[int]:
    return [leaf.size for leaf in jax.tree.leaves(w)]


def _scan(layer: Answer, w: Any, x: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, **options)[0]


def _all_written(layer: Answer, w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x),) * 2, x, w)[1][-1]


def _runs(
    layer: Answer,
    layers: Any,
    x: Any,
    *,
    key: Answer = _shapes_and_types,
    remat: Answer = jax.checkpoint,
    run: Answer = _scan,
) -> Any:
    for _, some in itertools.groupby(layers, key=key):
        x = run(remat(layer), jax.tree.map(lambda *leaves: jnp.stack(leaves), *some), x)
    return x


def _plainly(layer: Answer) -> Answer:
    return layer


def _all_but_alone(layer: Answer, w: Any, x: Any) -> Any:
    one = len(jax.tree.leaves(w)[0]) == 1
    return layer(jax.tree.map(lambda leaf: leaf[0], w), x) if one else _scan(jax.checkpoint(layer), w, x)


check_scan_runs = Exercise(
    3,
    _loop,
    {
        "Five equal layers": (_layer, _of_widths(*(4,) * 5)),
        "Layers of the widths 4, 4, 4, 7, 7, 4, 4": (_layer, _of_widths(4, 4, 4, 7, 7, 4, 4)),
        "One layer": (_layer, _of_widths(7)),
        "No layer at all, where x comes out as it went in": (_layer, []),
        "Another layer, whose weights are a list of an array and a tuple, each [D], [1] or [1, D]": (
            _affine,
            _of_other_trees(),
        ),
        "Layers of one shape, in float32, bfloat16, bfloat16, float32": (
            _in_its_type,
            _of_types("float32", "bfloat16", "bfloat16", "float32"),
        ),
    },
    "A program as long as its runs, and of each layer its input alone.",
    {
        "Is each layer used once, from first to last?": [
            partial(_runs, run=partial(_scan, reverse=True)),
            lambda layer, layers, x: _runs(layer, layers[1:], x),
        ],
        "Equal layers run together although others stand between them. Which are neighbours?": (
            lambda layer, layers, x: _runs(layer, sorted(layers, key=lambda w: str(_shapes(w))), x)
        ),
        "The result is right, and a gradient is lost.": (
            lambda layer, layers, x: _runs(layer, jax.lax.stop_gradient(layers), x)
        ),
        "Are all shapes of two layers compared?": [
            partial(_runs, key=lambda w: 0),
            partial(_runs, key=lambda w: _sizes(w)[0]),
            partial(_runs, key=lambda w: sum(_sizes(w))),
            partial(_runs, key=_sizes),
            partial(_runs, key=lambda w: {leaf.shape for leaf in jax.tree.leaves(w)}),
        ],
        "Are the types of two layers compared, too?": partial(_runs, key=_shapes),
        "Is a name of weights written into it?": partial(_runs, key=lambda w: w["up"].shape),
        "Does it need a first layer?": lambda layer, layers, x: _runs(layer, [layers[0], *layers[1:]], x),
        "a scan returns a pair": lambda layer, layers, x: (_runs(layer, layers, x), None),
    },
    {
        _kept: {
            "a checkpoint around the layer": [
                partial(_runs, remat=_plainly),
                partial(_runs, remat=partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)),
            ],
            "in a run of one as well": partial(_runs, remat=_plainly, run=_all_but_alone),
            "a whole run or a group of one": [
                lambda layer, layers, x: jax.checkpoint(partial(_runs, layer))(layers, x),
                partial(_runs, remat=_plainly, run=partial(apply_stack, mode="nested", remat="nothing")),
            ],
        },
        _loops_are_loops: {
            "grows with the layers": [
                lambda layer, layers, x: _loop(jax.checkpoint(layer), layers, x),
                partial(_runs, key=id),
                partial(_runs, run=partial(_scan, unroll=True)),
            ]
        },
        _only_the_last: {"writes down what every layer returns": partial(_runs, run=_all_written)},
    },
    otherwise="Apply the layers one after the other in a Python loop: where does yours begin to differ?",
    ask=_result_and_gradients,
    rtol=1e-4,
)
