"""The exercises of notebook 12: when a link is hidden, updates in a backward scan, clipping by the norm of all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import CHIPS, matmul_flops
from jaxmem.tracing.jaxprs import equations, inner_jaxprs, scan_parts
from llamem.planner import HOST_LINK, PRODUCTS
from llamem_course.exercises.exercise import Answer, Exercise

L, N, D, F = 5, 6, 8, 12  # layers, tokens and widths of the stack that answers are tried on
ONCE = 3 * L * 2 * N * 2 * D * F  # FLOPs of one way back: the layer again, and two matmuls for each of its own


_FORWARD, _TRAINED, _FROZEN = (1, 2), (6, 6), (1, 4)  # of a loop: numbers of a weight that cross, FLOPs for each token
_Loop = tuple[int, int]


def _hidden(
    flops: float,
    link: float,
    n_bytes: int,
    trained: bool,
    forward: _Loop = _FORWARD,
    backward: tuple[_Loop, _Loop] = (_TRAINED, _FROZEN),
) -> tuple[float, ...]:
    """Return the tokens from which on the link is hidden in the forward loop, and in the backward loop."""
    loops = forward, backward[not trained]
    return tuple(moved / work * n_bytes * flops / link for moved, work in loops)


def _pooled(flops: float, link: float, n_bytes: int, trained: bool) -> tuple[float, ...]:
    both = (7, 8) if trained else (2, 6)
    return _hidden(flops, link, n_bytes, trained, both, (both, both))


def _tokens(answer: Answer, *given: Any) -> Any:
    found = answer(*given)
    assert np.shape(found) == (2,), "return two numbers of tokens, of the forward loop and of the backward loop."
    for one, right in zip(found, _hidden(*given), strict=True):
        assert 1e-3 < one / right < 1e3, (
            f"{one:.3g} tokens? The link takes bytes / link, the matmuls FLOPs / flops. Set them equal, for one "
            "weight: how many there are cancels."
        )
    return tuple(found)


def _chips() -> dict[str, tuple[Any, ...]]:
    asked = (("v5e-1", 4, True), ("v6e-1", 2, True), ("v5e-1", 2, False), ("h100", 4, False))
    return {
        f"{chip}, {'trained' if trained else 'frozen'}, {size} bytes a number": (
            PRODUCTS * (CHIPS[chip].peak_flops or 0),
            HOST_LINK[chip.removesuffix("-1")],
            size,
            trained,
        )
        for chip, size, trained in asked
    }


check_hidden_from = Exercise(
    1,
    _hidden,
    _chips(),
    "The width of the layer never came up: bytes and matmuls both grow with its weights.",
    {
        "return two numbers": lambda *given: max(_hidden(*given)),
        "Set them equal, for one": lambda *given: tuple(4096**2 * one for one in _hidden(*given)),
        "Copies of the backward loop cannot hide behind matmuls of the forward loop, which is over. Count each loop.": (
            _pooled
        ),
        "Which of the two loops did you put first?": lambda *given: _hidden(*given)[::-1],
        "What runs once more in the backward loop?": partial(_hidden, backward=((6, 4), (1, 2))),
        "A matmul multiplies and adds: two FLOPs for each weight and token.": (
            partial(_hidden, forward=(1, 1), backward=((6, 3), (1, 2)))
        ),
        "Is that the forward loop once more, or a link that works both ways at once?": [
            partial(_hidden, backward=(_FORWARD, _FORWARD)),
            partial(_hidden, backward=((3, 6), _FROZEN)),
        ],
        "Do you send gradients? The layer is updated where they are.": partial(_hidden, backward=((7, 6), _FROZEN)),
        "Not all bytes are there. On the way back, what is fetched, and what goes home?": [
            partial(_hidden, backward=((moved, 6), _FROZEN)) for moved in (4, 5)
        ],
        "Four bytes for each number, here as well? How many has it?": (
            lambda flops, link, n_bytes, trained: _hidden(flops, link, 4, trained)
        ),
        "Adapters move, the frozen weights do not. What of a frozen layer has to cross the link?": [
            partial(_hidden, backward=(_TRAINED, frozen)) for frozen in (_TRAINED, (6, 4))
        ],
        "Which gradients does a frozen weight need, its own or that of the layer's input?": (
            partial(_hidden, backward=(_TRAINED, (1, 6)))
        ),
        "Twice as many as a frozen layer needs. Its weights come in and never go home, and its matmuls run once more "
        "before they give its input's gradient.": [
            partial(_hidden, backward=(_TRAINED, frozen)) for frozen in (_FORWARD, (2, 4))
        ],
    },
    otherwise="Count both sides for one weight.",
    ask=_tokens,
    told=lambda got, *_: f"{got[0]:,.0f} tokens forward and {got[1]:,.0f} backward are not it.",
    rtol=1e-3,
)


def _layer(w: Any, x_ND: Any) -> Any:
    return x_ND + jax.nn.silu(x_ND @ w["up"]) @ w["down"]


def _update(state: Any, grads: Any, decay: float = 0.9, rate: float = 0.5) -> Any:
    m = jax.tree.map(lambda m, g: decay * m + 0.1 * g, state["m"], grads)
    return {"w": jax.tree.map(lambda w, m: w - rate * m, state["w"], m), "m": m}


_other_update = partial(_update, decay=0.6, rate=0.3)


def _given() -> tuple[Any, Any, Any]:
    """Return a state of stacked layers, what entered each of them, and the gradient of what left the last."""
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"up": (L, D, F), "down": (L, F, D)}
    w, m = (
        {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in zip(pair, shapes.items(), strict=True)}
        for pair in (keys[:2], keys[2:4])
    )
    _, inputs_LND = jax.lax.scan(lambda x, w: (_layer(w, x), x), jax.random.normal(keys[4], (N, D)), w)
    return {"w": w, "m": m}, inputs_LND, jax.random.normal(keys[5], (N, D))


def _take(stack: Any, i: Any) -> Any:
    return jax.tree.map(lambda a: a[i], stack)


def _put(stack: Any, one: Any, i: Any) -> Any:
    return jax.tree.map(lambda a, b: a.at[i].set(b), stack, one)


def _squares(grads: Any) -> Any:
    """Return the sum of squares of each layer's gradients, or of one layer's."""
    return sum(jnp.sum(g**2, axis=(-2, -1)) for g in jax.tree.leaves(grads))


def _autodiff(layer: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> tuple[Any, Any]:
    """Return the gradients of all layers, and that of what entered the first."""

    def whole(w: Any, x_ND: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x_ND, w)[0]

    return jax.vjp(whole, state["w"], inputs_LND[0])[1](dy_ND)


def _all_at_once(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> tuple[Any, Any]:
    grads, dx_ND = _autodiff(layer, state, inputs_LND, dy_ND)
    return dx_ND, jax.vmap(update)(state, grads)


def _clipped(
    layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any, limit: Any, *, factor: Answer
) -> Any:
    """Return the new state, all gradients kept and each layer's multiplied by `factor(squares, limit, dy_ND)`."""
    grads, _ = _autodiff(layer, state, inputs_LND, dy_ND)
    by = jnp.minimum(1.0, factor(_squares(grads), limit, dy_ND)).reshape(-1, 1, 1)
    return jax.vmap(update)(state, jax.tree.map(lambda g: by * g, grads))


def _found(answer: Answer, update: Answer) -> Any:
    found = answer(_layer, update, *GIVEN)
    assert isinstance(found, tuple) and len(found) == 2, "return two things: the gradient of the input, and the state."
    return found


def _new_state(answer: Answer, update: Answer, limit: float) -> Any:
    found = answer(_layer, update, *GIVEN, limit)
    assert not isinstance(found, tuple), "return the new state alone."
    return found


def _layers_off(got: Any, expected: Any, *_: Any) -> str:
    new, right = (one[-1] if isinstance(one, tuple) else one for one in (got, expected))
    if jax.tree.map(jnp.shape, new) != jax.tree.map(jnp.shape, right):
        return "the new state has other names or shapes than the old one: are all layers in it?"
    off = [
        i
        for i in range(L)
        if not all(jax.tree.leaves(jax.tree.map(lambda a, b, i=i: np.allclose(a[i], b[i], atol=1e-4), new, right)))
    ]
    if not off:
        return "the layers are right, the gradient of the first layer's input is not."
    return f"layers {off} are not those of autodiff and the same update, layer by layer."


def _program(answer: Answer, *limit: float, layers: int = L) -> Any:
    state, inputs_LND, dy_ND = GIVEN
    given = _take(state, slice(layers)), inputs_LND[:layers], dy_ND, *limit
    try:
        return jax.make_jaxpr(lambda *given: answer(_layer, _update, *given))(*given).jaxpr
    except jax.errors.TracerBoolConversionError:
        raise AssertionError(
            "inside a compiled program the norm has no value yet, and Python's `if` cannot ask for it. Which function "
            "of jnp takes the smaller of two numbers?"
        ) from None


def _no_layer_twice(answer: Answer, *limit: float) -> None:
    flops, enough = matmul_flops(_program(answer, *limit)), (1 + len(limit)) * ONCE
    assert flops < 1.1 * enough, (
        f"the numbers are right, but the matmuls take {flops:,} FLOPs where {enough:,} are enough: a layer is computed "
        "more than once on a way back. Which call gives both gradients from one forward pass?"
    )


def _no_gradient_waits(answer: Answer, *limit: float) -> None:
    """Run the answer, and write down in which order gradients are made (G) and used up (U)."""
    events: list[str] = []

    def note(letter: str, arrays: Any) -> Any:
        jax.debug.callback(lambda _: events.append(letter), jax.tree.leaves(arrays)[0].ravel()[0], ordered=True)
        return arrays

    layer = jax.custom_vjp(_layer)
    layer.defvjp(lambda *given: jax.vjp(_layer, *given), lambda pull, dy_ND: note("G", pull(dy_ND)))
    try:
        jax.block_until_ready(answer(layer, lambda state, grads: note("U", _update(state, grads)), *GIVEN, *limit))
        jax.effects_barrier()
    except (NotImplementedError, ValueError):  # updates under vmap, all at once, have no order
        events.clear()
    first = "G" * L if limit else ""
    assert "".join(events) == first + "GU" * L, (
        "the numbers are right, but gradients of several layers wait for their update: they exist at once, and that "
        "room was to be saved. Where must the update stand, and what of a gradient is needed after its turn?"
    )


def _one_loop(answer: Answer, *limit: float) -> None:
    few, many = (sum(1 for _ in equations(_program(answer, *limit, layers=layers))) for layers in (3, L))
    assert many < 1.2 * few, (
        f"the numbers are right, but the program has {few} operations for three layers and {many} for {L}: a loop of "
        "Python's writes each layer into it, for the compiler to work on one by one. Which loop of JAX's is compiled "
        "once for all of its turns?"
    )


def _no_second_stack(answer: Answer, *limit: float) -> None:
    """Refuse whatever is as large as all layers, but a loop's carry and updates in place."""
    in_place = ("dynamic_update_slice", "scatter", "device_put", "optimization_barrier")
    stacks, of_state = {(L, D, F), (L, F, D)}, len(jax.tree.leaves(GIVEN[0]))
    for eqn, _ in equations(_program(answer, *limit)):
        given = sum(getattr(var.aval, "shape", ()) in stacks for var in eqn.invars)
        assert eqn.primitive.name not in ("scan", "while") or given <= of_state, (
            f"the numbers are right, but a loop is given {given} arrays as large as all layers, and the state has "
            f"{of_state}. Gradients that are kept are one more, and so is an old state that is read while a new one is "
            "written. From which one must a turn read?"
        )
        made = eqn.outvars[scan_parts(eqn)[1] :] if eqn.primitive.name == "scan" else eqn.outvars
        if eqn.primitive.name in in_place or (inner_jaxprs(eqn) and eqn.primitive.name != "scan"):
            continue
        assert not {getattr(var.aval, "shape", ()) for var in made} & stacks, (
            f"the numbers are right, but `{eqn.primitive.name}` makes an array as large as the weights of all layers, "
            "beside the state that was given. There is no room for two. A scan's outputs are a second stack: in which "
            "part of a scan does one turn change what the next one is given?"
        )


def _by(visit: Callable[..., Any], reverse: bool = True) -> Answer:
    """Return an answer that visits layer after layer: `visit(layer, update, dx, state, i, x)`."""

    def answer(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
        def turn(carry: Any, at: Any) -> Any:
            return visit(layer, update, *carry, *at), None

        at = jnp.arange(len(inputs_LND)), inputs_LND
        return jax.lax.scan(turn, (dy_ND, state), at, reverse=reverse)[0]

    return answer


def _visit(layer: Answer, update: Answer, dx: Any, state: Any, i: Any, x: Any) -> Any:
    one = _take(state, i)
    grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
    return dx, _put(state, update(one, grads), i)


def _dx_stays(layer: Answer, update: Answer, dx: Any, *given: Any) -> Any:
    return dx, _visit(layer, update, dx, *given)[1]


def _through(after: bool) -> Callable[..., Any]:
    """Return a visit that takes two gradients apart, that of x at the new weights or at the old."""

    def visit(layer: Answer, update: Answer, dx: Any, state: Any, i: Any, x: Any) -> Any:
        old = _take(state, i)
        (grads,) = jax.vjp(lambda w: layer(w, x), old["w"])[1](dx)
        state = _put(state, update(old, grads), i)
        w = (_take(state, i) if after else old)["w"]
        return jax.vjp(lambda x: layer(w, x), x)[1](dx)[0], state

    return visit


def _two_by_two(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
    for last in range(len(inputs_LND) - 1, -1, -2):
        pair, found = [i for i in (last, last - 1) if i >= 0], {}
        for i in pair:
            found[i], dy_ND = jax.vjp(layer, _take(state, i)["w"], inputs_LND[i])[1](dy_ND)
        for i in pair:
            state = _put(state, update(_take(state, i), found[i]), i)
    return dy_ND, state


def _python_loop(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
    for i in reversed(range(len(inputs_LND))):
        dy_ND, state = _visit(layer, update, dy_ND, state, i, inputs_LND[i])
    return dy_ND, state


def _reads_the_old(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
    def visit(layer: Answer, update: Answer, dx: Any, new: Any, i: Any, x: Any) -> Any:
        grads, dx = jax.vjp(layer, _take(state, i)["w"], x)[1](dx)
        return dx, _put(new, update(_take(state, i), grads), i)

    return _by(visit)(layer, update, state, inputs_LND, dy_ND)


def _gradients_carried(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
    def visit(layer: Answer, update: Answer, dx: Any, both: Any, i: Any, x: Any) -> Any:
        grads, dx = jax.vjp(layer, _take(both[0], i)["w"], x)[1](dx)
        kept = _put(both[1], grads, i)
        return dx, (_put(both[0], update(_take(both[0], i), _take(kept, i)), i), kept)

    dx_ND, (state, _) = _by(visit)(layer, update, (state, state["w"]), inputs_LND, dy_ND)
    return dx_ND, state


def _stacked(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any) -> Any:
    def turn(dx: Any, at: Any) -> Any:
        grads, dx = jax.vjp(layer, at[0]["w"], at[1])[1](dx)
        return dx, update(at[0], grads)

    return jax.lax.scan(turn, dy_ND, (state, inputs_LND), reverse=True)


GIVEN, _BACK = _given(), _by(_visit)
_UPDATES = {"With the first `update`": (_update,), "With another `update`": (_other_update,)}

check_backward_scan = Exercise(
    2,
    _all_at_once,
    _UPDATES,
    "Both gradients from the old weights, then the update: the order is all.",
    {
        "return two things": lambda *given: _BACK(*given)[1],
        "other names or shapes": lambda *given: (_BACK(*given)[0], _take(_BACK(*given)[1], slice(1, None))),
        "the gradient of the first layer's input is not": lambda *given: (given[-1], _BACK(*given)[1]),
        "not those of autodiff": lambda layer, update, state, inputs, dy: _BACK(layer, update, state, inputs, -dy),
        "The last layer, where you begin, is right, and every layer before it is a little off. By whose weights did "
        "dx pass on its way from one layer to the next?": _by(_through(after=True)),
        "Every layer but the last got dy_ND as it was given. The layer below needs the gradient of this layer's input: "
        "it has to be carried on.": _by(_dx_stays),
        "The state came back as it was: is what you update also what you return?": (
            lambda layer, update, state, *given: (_BACK(layer, update, state, *given)[0], state)
        ),
        "The moments came back as they were. What all does `update` return?": (
            lambda layer, update, state, *given: (
                _BACK(layer, update, state, *given)[0],
                {**_BACK(layer, update, state, *given)[1], "m": state["m"]},
            )
        ),
        "You go through the layers forwards. Which one's gradient is known first?": _by(_visit, reverse=False),
        "Each layer is right, and they stand in reverse order: which is the first of the stack?": (
            lambda *given: (_BACK(*given)[0], _take(_BACK(*given)[1], slice(None, None, -1)))
        ),
        "Is it `update` that you call?": lambda layer, update, *given: _BACK(layer, _update, *given),
    },
    {
        _no_layer_twice: {"Which call gives both gradients": _by(_through(after=False))},
        _no_gradient_waits: {"wait for their update": [_all_at_once, _two_by_two]},
        _one_loop: {"a loop of Python's": _python_loop},
        _no_second_stack: {
            "There is no room for two": _stacked,
            "From which one must a turn read": [_reads_the_old, _gradients_carried],
        },
    },
    ask=_found,
    told=_layers_off,
    rtol=1e-4,
)


def _to_the_norm(squares: Any, limit: Any, dy_ND: Any) -> Any:
    return limit / jnp.sqrt(jnp.sum(squares))


def _norm_of_autodiff(*given: Any) -> Any:
    return jnp.sqrt(jnp.sum(_squares(_autodiff(*given)[0])))


def _again(norm_of: Answer, backward: Answer = _BACK) -> Answer:
    """Return an answer that goes back once for the norm, and once with a dy that makes all gradients smaller."""

    def answer(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any, limit: Any) -> Any:
        factor = jnp.minimum(1.0, limit / norm_of(layer, state, inputs_LND, dy_ND))
        return backward(layer, update, state, inputs_LND, factor * dy_ND)[1]

    return answer


NORM = float(_norm_of_autodiff(_layer, *GIVEN))


def _carried_norm(layer: Answer, state: Any, inputs_LND: Any, dy_ND: Any, again: bool = False) -> Any:
    def turn(carry: Any, at: Any) -> Any:
        grads, dx_ND = jax.vjp(layer, *at)[1](carry[0])
        if again:
            dx_ND = jax.vjp(layer, at[0], 1.0 * at[1])[1](carry[0])[1]
        return (dx_ND, carry[1] + _squares(grads)), None

    return jnp.sqrt(jax.lax.scan(turn, (dy_ND, 0.0), (state["w"], inputs_LND), reverse=True)[0][1])


def _pythons_if(layer: Answer, update: Answer, state: Any, inputs_LND: Any, dy_ND: Any, limit: Any) -> Any:
    norm = _carried_norm(layer, state, inputs_LND, dy_ND)
    return _BACK(layer, update, state, inputs_LND, dy_ND * (limit / norm if norm > limit else 1.0))[1]


def _clipping(demand: Callable[..., None]) -> Answer:
    return lambda answer: demand(answer, NORM / 3)


def _but(factor: Answer) -> Answer:
    return partial(_clipped, factor=factor)


check_clipped_scan = Exercise(
    3,
    _but(_to_the_norm),
    {
        f"The norm of all gradients is {NORM:.2f}. With max_norm={by * NORM:.2f}{words}": (update, by * NORM)
        for by, words, update in (
            (2.0, ", where nothing is to be clipped", _update),
            (1 / 30, "", _update),
            (1 / 30, " and another `update`", _other_update),
        )
    },
    "Two passes over the layers, and never the gradients of two layers at once.",
    {
        "return the new state alone": lambda *given: _BACK(*given[:-1]),
        "The state came back as it was: is what you update also what you return?": lambda *given: given[2],
        "Each layer is to be updated once.": lambda layer, update, state, *given: _BACK(
            layer, update, _BACK(layer, update, state, *given[:-1])[1], *given[:-1]
        )[1],
        "Nothing is clipped here, or by another norm than that of all the weights' gradients.": (
            _but(lambda squares, limit, dy: jnp.ones(()))
        ),
        "That is the norm of dy_ND. Asked for was the norm of the weights' gradients.": (
            _but(lambda squares, limit, dy: limit / jnp.linalg.norm(dy))
        ),
        "Each layer is clipped by its own norm here. Asked for was the norm of all of them.": (
            _but(lambda squares, limit, dy: limit / jnp.sqrt(squares))
        ),
        "You add up norms of layers. Of which numbers is the norm of all the root of the sum?": (
            _but(lambda squares, limit, dy: limit / jnp.sum(jnp.sqrt(squares)))
        ),
        "A norm is a root: you divide by the sum of the squares itself.": (
            _but(lambda squares, limit, dy: limit / jnp.sum(squares))
        ),
        "The last layer, where you begin, is clipped by what was known by then, its own norm. When is the norm of all "
        "known, and what can you do until then?": (
            _but(lambda squares, limit, dy: limit / jnp.sqrt(jnp.cumsum(squares[::-1])[::-1]))
        ),
        "All gradients are to be smaller by one factor, max_norm / norm.": (
            _but(lambda squares, limit, dy: limit / jnp.sqrt(jnp.max(squares)))
        ),
        "Is it `update` that you call?": lambda layer, update, *given: _but(_to_the_norm)(layer, _update, *given),
    },
    {
        _clipping(_no_layer_twice): {
            "more than once on a way back": _again(partial(_carried_norm, again=True)),
            "Python's `if` cannot ask": _pythons_if,
        },
        _clipping(_no_gradient_waits): {"wait for their update": _but(_to_the_norm)},
        _clipping(_one_loop): {"a loop of Python's": _again(_carried_norm, _python_loop)},
        _clipping(_no_second_stack): {
            "There is no room for two": _again(_norm_of_autodiff),
            "From which one must a turn read": _again(_carried_norm, _reads_the_old),
        },
    },
    otherwise="All gradients are to be smaller by one factor, max_norm / norm.",
    ask=_new_state,
    told=_layers_off,
    rtol=1e-4,
)
