"""Checks of notebook 12's exercises: when a link is hidden, updates in a backward scan, clipping by the norm of all."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import CHIPS, matmul_flops
from llamem.planner import HOST_LINK, PRODUCTS
from llamem_course.exercises import grade
from llamem_course.exercises.waiting_gradients import (
    D,
    F,
    L,
    N,
    refuse_growth,
    refuse_second_state,
    refuse_waiting_gradients,
)

ONCE = 3 * L * 2 * N * 2 * D * F  # FLOPs of one way back: the layer again, and two products for each of its own


def check_hidden_from(fn: Callable[..., float]) -> None:
    """Exercise 1: tokens from which on the link hides behind the products."""

    def body() -> str:
        for chip, weight_bytes, trained in (("v5e", 4, True), ("v6e", 2, True), ("v5e", 2, False), ("h100", 4, False)):
            peak = CHIPS[chip if chip == "h100" else f"{chip}-1"].peak_flops
            assert peak
            flops, link = PRODUCTS * peak, HOST_LINK[chip]
            found = fn(flops, link, weight_bytes, trained)
            assert found is not None and np.ndim(found) == 0, "return one number of tokens"
            moved, work = (7, 8) if trained else (2, 6)
            right = weight_bytes * moved * flops / (link * work)
            case = f"{chip}, {'trained' if trained else 'frozen'}, {weight_bytes} bytes a number"
            share = float(found) / right
            assert 1e-3 < share < 1e3, (
                f"{case}: {found:.3g} tokens? The link takes bytes / link, the products FLOPs / flops. "
                "Set them equal, for one weight: how many there are cancels"
            )
            assert weight_bytes == 2 or abs(share / 2 - 1) > 1e-3, (
                f"{case}: four FLOPs for each weight and token. There are four products, and in each a multiplication "
                "and an addition"
            )
            _not_these(case, share, trained)
            assert abs(share - 1) < 1e-3, f"{case}: {found:.0f} tokens are not it. Count both sides for one weight"
        return "The width of the layer never came up: bytes and products both grow with its weights."

    grade(1, body)


def _not_these(case: str, share: float, trained: bool) -> None:
    """Raise for answers that a known mistake explains; `share` is the answer over the right one."""
    mistakes = {
        True: {
            8 / 6: "six FLOPs for each weight and token keep everything. What runs once more?",
            8
            / 7: "seven numbers cross, for eight FLOPs a token. Do you send gradients, or leave the forward pass out?",
            8 / 2: "that is the forward pass alone. What else is computed while a layer's bytes are on their way?",
            2.0: "four bytes for each number, here as well? How many has it?",
            4 / 7: "that is one direction of the cable. All bytes are asked for: what goes back as well?",
            5 / 7: "what is fetched. And what goes back?",
            6 / 7: "weights are fetched once in your answer. In which passes are they needed?",
            3 / 7: "weights and moments, once in one direction. Follow a layer through forward, backward and update.",
        },
        False: {
            6 / 8: "frozen weights are not trained. Which product of the backward pass has nobody asked for?",
            7 / 2 * 6 / 8: "adapters move, the frozen weights do not. What of a frozen layer has to cross the link?",
            7 / 2: "adapters move, the frozen weights do not. What of a frozen layer has to cross the link?",
            1 / 2: "weights are fetched once in your answer. In which passes are they needed?",
            6 / 2: "that is the forward pass alone. What else is computed while a layer's bytes are on their way?",
            6 / 4: "half as many again. Does a frozen weight go home? And what runs once more in the backward pass?",
        },
    }
    for ratio, hint in mistakes[trained].items():
        if abs(share / ratio - 1) < 1e-3:
            raise AssertionError(f"{case}: {hint}")


def _layer(w: Any, x_ND: Any) -> Any:
    return x_ND + jax.nn.silu(x_ND @ w["up"]) @ w["down"]


def _update(state: Any, grads: Any, decay: float = 0.9, rate: float = 0.5) -> Any:
    # Padded and cut again, so that the program shows by shapes where an update stands, and of how many layers.
    seen = jax.tree.map(lambda g: jnp.pad(g, ((0, 1), (0, 0)))[:-1], grads)
    m = jax.tree.map(lambda m, g: decay * m + 0.1 * g, state["m"], seen)
    return {"w": jax.tree.map(lambda w, m: w - rate * m, state["w"], m), "m": m}


_other_update = functools.partial(_update, decay=0.6, rate=0.3)


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


def _autodiff(state: Any, inputs_LND: Any, dy_ND: Any) -> tuple[Any, Any]:
    """Return the gradients of all layers, and that of what entered the first."""

    def whole(w: Any, x_ND: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jax.checkpoint(_layer)(w, x), None), x_ND, w)[0]

    return jax.vjp(whole, state["w"], inputs_LND[0])[1](dy_ND)


def check_backward_scan(fn: Callable[..., Any]) -> None:
    """Exercise 2: from the last layer to the first, each updated as soon as its gradient is there."""
    state, inputs_LND, dy_ND = _given()
    grads, d_first_ND = _autodiff(state, inputs_LND, dy_ND)
    expected = _update_all(state, grads)

    def body() -> str:
        found = _called(fn, state, inputs_LND, dy_ND)
        dx_ND, new = found
        _same_shapes(new, state)
        assert jnp.shape(dx_ND) == (N, D), f"first comes the gradient of the first layer's input, {(N, D)}"
        wrong = [i for i in range(L) if not _near(_one(new, i), _one(expected, i))]
        if wrong == list(range(L - 1)) and _near(new, _update_all(state, _dx_not_passed_on(state))):
            raise AssertionError(
                f"layer {L - 1} is right, and every other one got dy_ND as it was given. The layer below needs the "
                "gradient of this layer's input: it has to be carried on"
            )
        if wrong == list(range(L - 1)):
            raise AssertionError(
                f"layer {L - 1}, where you begin, is right, and every layer before it is a little off: something went "
                "wrong on the way from one layer to the next. By whose weights did dx pass?"
            )
        assert not _near(new, state), "the state came back as it was: is what you update also what you return?"
        assert not _near(new["m"], state["m"]), "the moments came back as they were. What all does `update` return?"
        if 0 in wrong and L - 1 in wrong and _near(_one(new, 0), _one(_update_all(state, _forwards(state)), 0)):
            raise AssertionError("you go through the layers forwards. Which one's gradient is known first?")
        if _near(new, jax.tree.map(lambda a: a[::-1], expected)):
            raise AssertionError(
                "each layer is right, and they stand in reverse order: which is the first of the stack?"
            )
        assert not wrong, f"layers {wrong} are not those of autodiff and the same update, layer by layer"
        assert _near(dx_ND, d_first_ND), "the layers are right, the gradient of the first layer's input is not"
        other = fn(_layer, _other_update, state, inputs_LND, dy_ND)[1]
        assert _near(other, _update_all(state, grads, _other_update)), (
            "with another `update` your layers are wrong: is it `update` that you call?"
        )
        program = _traced(fn, state, inputs_LND, dy_ND)
        refuse_waiting_gradients(program)
        refuse_growth(_traced(fn, _one(state, slice(3)), inputs_LND[:3], dy_ND), program)
        refuse_second_state(program)
        flops = _flops(fn, state, inputs_LND, dy_ND)
        if flops > 1.1 * ONCE:
            raise AssertionError(
                f"the numbers are right, but the products take {flops:,} FLOPs where {ONCE:,} are enough: the layer is "
                "computed more than once. Which call gives both gradients from one forward pass?"
            )
        return "Both gradients from the old weights, then the update: the order is all."

    def _forwards(state: Any) -> Any:
        def step(dx: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
            d_w, dx = jax.vjp(_layer, *at)[1](dx)
            return dx, d_w

        return jax.lax.scan(step, dy_ND, (state["w"], inputs_LND))[1]

    def _dx_not_passed_on(state: Any) -> Any:
        return jax.vmap(lambda w, x_ND: jax.vjp(_layer, w, x_ND)[1](dy_ND)[0])(state["w"], inputs_LND)

    grade(2, body)


def check_clipped_scan(fn: Callable[..., Any]) -> None:
    """Exercise 3: the same, with all gradients clipped by the norm of all of them."""
    state, inputs_LND, dy_ND = _given()
    grads, _ = _autodiff(state, inputs_LND, dy_ND)
    norm = _norm(grads)
    layers = [_norm(_one(grads, i)) for i in range(L)]

    def body() -> str:
        loose = fn(_layer, _update, state, inputs_LND, dy_ND, 2 * norm)
        _same_shapes(loose, state)
        assert not _near(loose, state), "the state came back as it was: is what you update also what you return?"
        assert _near(loose, _update_all(state, grads)), (
            f"the norm of all gradients is {norm:.2f}. With max_norm={2 * norm:.2f} nothing is to be clipped, and each "
            "layer is to be updated once: your layers differ from that"
        )
        limit = norm / 3
        tight = fn(_layer, _update, state, inputs_LND, dy_ND, limit)
        _same_shapes(tight, state)
        assert not _near(tight, loose), (
            f"with max_norm={limit:.2f}, a third of the norm of all the weights' gradients, nothing changed: they are "
            "not clipped, or by another norm"
        )
        if _near(tight, _scaled(limit / float(jnp.linalg.norm(dy_ND)))):
            raise AssertionError("that is the norm of dy_ND. Asked for was the norm of the weights' gradients")
        own = [min(1.0, limit / size) for size in layers]
        by_layer = jax.tree.map(lambda g: g * jnp.asarray(own)[:, None, None], grads)
        if _near(tight, _update_all(state, by_layer)):
            raise AssertionError("each layer is clipped by its own norm here. Asked for was the norm of all of them")
        if _near(tight, _scaled(limit / sum(layers))):
            raise AssertionError("you add up norms of layers. Of which numbers is the norm of all the root of the sum?")
        if _near(tight, _scaled(limit / norm**2)):
            raise AssertionError("a norm is a root: you divide by the sum of the squares itself")
        last = min(1.0, limit / layers[-1])
        begun = _near(_one(tight, L - 1), _one(_update_all(state, jax.tree.map(lambda g: last * g, grads)), L - 1))
        if begun:
            raise AssertionError(
                f"layer {L - 1}, where you begin, is clipped by what was known by then, its own norm. When is the norm "
                "of all known, and what can you do until then?"
            )
        assert _near(tight, _scaled(limit / norm)), "all gradients are to be smaller by one factor, max_norm / norm"
        other = fn(_layer, _other_update, state, inputs_LND, dy_ND, limit)
        assert _near(other, _scaled(limit / norm, _other_update)), (
            "with another `update` your layers are wrong: is it `update` that you call?"
        )
        try:
            program = _traced(fn, state, inputs_LND, dy_ND, limit)
        except jax.errors.TracerBoolConversionError as error:
            raise AssertionError(
                "inside a compiled program the norm has no value yet, and Python's `if` cannot ask for it. Which "
                "function of jnp takes the smaller of two numbers?"
            ) from error
        refuse_waiting_gradients(program)
        refuse_growth(_traced(fn, _one(state, slice(3)), inputs_LND[:3], dy_ND, limit), program)
        refuse_second_state(program)
        flops = _flops(fn, state, inputs_LND, dy_ND, limit)
        if flops > 2.2 * ONCE:
            raise AssertionError(
                f"the numbers are right, but the products take {flops:,} FLOPs where two ways back take {2 * ONCE:,}: "
                "once for the norm and once for the update is enough"
            )
        return "Two passes over the layers, and never the gradients of two layers at once."

    def _scaled(factor: float, update: Callable[..., Any] = _update) -> Any:
        return _update_all(state, jax.tree.map(lambda g: factor * g, grads), update)

    grade(3, body)


def _called(fn: Callable[..., Any], *args: Any) -> Any:
    found = fn(_layer, _update, *args)
    assert isinstance(found, tuple) and len(found) == 2, "return two things: the gradient of the input, and the state"
    return found


def _same_shapes(new: Any, state: Any) -> None:
    assert jax.tree.structure(new) == jax.tree.structure(state), "the new state has other names than the old one"
    assert all(jnp.shape(a) == b.shape for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)), (
        "the new state has other shapes than the old one: are all layers in it?"
    )


def _traced(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(lambda *args: fn(_layer, _update, *args))(*args).jaxpr


def _flops(fn: Callable[..., Any], *args: Any) -> int:
    return matmul_flops(_traced(fn, *args))


def _update_all(state: Any, grads: Any, update: Callable[..., Any] = _update) -> Any:
    return jax.vmap(update)(state, grads)


def _one(tree: Any, i: int | slice) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _norm(tree: Any) -> float:
    return float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))))


def _near(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
