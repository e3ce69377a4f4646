"""Checks of the exercises of notebook 04."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises import grade


def check_crossing(fn: Callable[[int, int, int], float]) -> None:
    """Exercise 1: the number of tokens at which tiles of tokens need as much as all logits in 16 bits."""

    def body() -> str:
        for width, vocab, tiles in ((4096, 128_256, 16), (2048, 128_256, 16), (4096, 32_000, 16), (1024, 151_936, 4)):
            case = f"a width of {width:,}, {vocab:,} words, {tiles} tiles"
            found = fn(width, vocab, tiles)
            assert found is not None, f"{case}: return a number of tokens"
            found = float(found)
            right = 4 * width / (2 - 4 / tiles)
            told = (
                (2 * width, "the tile of logits has been left out: it takes 4 * N * V / num_tiles bytes"),
                (4 * width / (2 - 2 / tiles), "in a tile a logit takes four bytes, for the softmax"),
                (2 * width / (2 - 4 / tiles), "is the sum of the head's gradient in 16 bits, or in 32?"),
                (4 * width / (2 + 4 / tiles), "the tile stands on the side of the tiles: mind the sign"),
                (1 / right, "that is the inverse; which side has N?"),
                (right * vocab, "both sides have V as a factor, the sum as well as the logits"),
                (right / vocab, "both sides have V as a factor, the sum as well as the logits"),
            )
            if not np.isclose(found, right, rtol=1e-6):
                hint = next((hint for wrong, hint in told if np.isclose(found, wrong, rtol=1e-3)), "")
                more, less = 2 * found * vocab, 4 * vocab * width + 4 * found * vocab / tiles
                sides = f"with {found:,.2f} tokens all logits take {more:,.0f} bytes, tiles of tokens {less:,.0f}"
                whole = np.isclose(found, right, rtol=1e-3)
                unsolved = "write down both and solve for N; on which side does num_tiles stand?"
                hint = hint or ("return the fraction, unrounded" if whole else unsolved)
                raise AssertionError(f"{case}: {sides}; {hint}.")
        return "The vocabulary cancels! With 16 tiles and a width of 4,096 the H100's compiler turns there, too."

    grade(1, body)


def check_smoothed_gradient(fn: Callable[..., Any]) -> None:
    """Exercise 2: the gradient of label-smoothed cross-entropy for the logits."""
    z_NV = jax.random.normal(jax.random.key(0), (6, 5))
    targets_N = jnp.array([0, 4, 2, 2, 1, 3])

    def losses(z_NV: Any, epsilon: float, targets_N: Any = targets_N) -> Any:
        logp_NV = jax.nn.log_softmax(z_NV)
        picked_N = jnp.take_along_axis(logp_NV, targets_N[:, None], 1)[:, 0]
        return -jnp.sum((1 - epsilon) * picked_N + epsilon * logp_NV.mean(1))

    def body() -> str:
        found, smoothed = fn(z_NV, targets_N, 0.0), fn(z_NV, targets_N, 0.3)
        plain = jax.grad(losses)(z_NV, 0.0)
        _close(
            found,
            plain,
            "with epsilon 0 it must be the gradient that this notebook derived, of the sum: compare sign, size, rows",
        )
        if np.allclose(smoothed, plain, atol=1e-5):
            raise AssertionError("epsilon changes nothing in your answer. Which term of the loss does it enter?")
        scaled = jax.nn.softmax(z_NV) - jax.nn.one_hot(targets_N, z_NV.shape[1])
        if np.allclose(smoothed, 0.7 * scaled, atol=1e-5):
            raise AssertionError(
                "you scaled the whole difference. The mixture of targets has two parts; which of the two, softmax "
                "or targets, does it replace?"
            )
        rows_N = np.asarray(smoothed).sum(1)
        if not np.allclose(rows_N, 0, atol=1e-5):
            raise AssertionError(
                f"your rows sum to {rows_N[0]:.3f}. What does a mixture of targets weigh in all, and what must a row "
                "of the gradient then sum to?"
            )
        hint = "the rows sum to 0, but the weight lies on the wrong words: 'all V' of the text includes the target"
        _close(smoothed, jax.grad(losses)(z_NV, 0.3), hint)
        hint = "right for an epsilon of 0.3, wrong for 0.1: is a number written into your answer?"
        _close(fn(z_NV, targets_N, 0.1), jax.grad(losses)(z_NV, 0.1), hint)
        more_NV = jax.random.normal(jax.random.key(1), (4, 9))
        hint = "right for a vocabulary of 5 words, wrong for one of 9: is a number of words written into your answer?"
        _close(fn(more_NV, targets_N[:4], 0.3), jax.grad(losses)(more_NV, 0.3, targets_N[:4]), hint)
        hint = "logits of 200 come out wrong: what is exp of 200 in float32, and what does softmax do first?"
        _close(fn(200 * z_NV[:4], targets_N[:4], 0.1), jax.grad(losses)(200 * z_NV[:4], 0.1, targets_N[:4]), hint)
        return "Every row still sums to 0: a mixture of targets weighs 1, and so does softmax."

    grade(2, body)


def check_frozen_loss(fn: Callable[..., Any]) -> None:
    """Exercise 3: `custom_vjp` around a function that makes the loss and one gradient."""

    def make_openly(x_ND: Any, head_VD: Any, targets_N: Any) -> tuple[Any, Any]:
        d_NV = jax.nn.softmax(_logits(x_ND, head_VD)) - jax.nn.one_hot(targets_N, len(head_VD))
        return _plain(x_ND, head_VD, targets_N), d_NV @ head_VD.astype(jnp.float32)

    def make(*given: Any) -> tuple[Any, Any]:
        return jax.lax.stop_gradient(make_openly(*given))  # the gradient is made, nothing here may be differentiated

    def body() -> str:
        x_ND, head_VD, targets_N = _inputs(jnp.float32)
        loss = fn(make)
        assert callable(loss), "return the loss, a function of hidden states, head and targets"
        value = loss(x_ND, head_VD, targets_N)
        assert getattr(value, "shape", None) == (), (
            "the loss is one number; its gradient is a residual, no second result"
        )
        _close(value, _plain(x_ND, head_VD, targets_N), "the value is that of `sweep`")
        for scale, where in ((1.0, "a sum"), (1 / 12, "a mean"), (-1 / 3, "a loss that is subtracted")):
            found = jax.grad(lambda x, scale=scale: scale * loss(x, head_VD, targets_N))(x_ND)
            exact = jax.grad(lambda x, scale=scale: scale * _plain(x, head_VD, targets_N))(x_ND)
            assert np.any(found), (
                "the gradient is all zeros: JAX finds nothing in `sweep` to differentiate. Which tool gives it the "
                "gradient that `sweep` returns?"
            )
            hint = ""
            if getattr(found, "shape", None) == exact.shape:
                factor = float(jnp.vdot(found, exact) / jnp.vdot(exact, exact))
                hint = f", {factor:.3g} times the right one: the loss is multiplied by {scale:.3g} after yours. By "
                hint += "which way does your backward pass learn of that number?"
            _close(found, exact, f"under {where} the gradient of the hidden states is wrong{hint}")
        openly = jax.grad(fn(make_openly))(x_ND, head_VD, targets_N)
        hint = "where JAX can differentiate `sweep`, such as `frozen_head`, the gradient is wrong: does it come twice?"
        _close(openly, jax.grad(_plain)(x_ND, head_VD, targets_N), hint)
        value, _ = jax.value_and_grad(loss)(x_ND, head_VD, targets_N)
        hint = (
            "the value is that of `sweep` as long as nobody differentiates; what does your forward pass return first?"
        )
        _close(value, _plain(x_ND, head_VD, targets_N), hint)
        try:
            for_head = jax.grad(loss, argnums=1)(x_ND, head_VD, targets_N)
        except jax.errors.UnexpectedTracerError:  # a loss of x alone around the others: nobody asked for more
            for_head = jnp.zeros_like(head_VD)
        _close(for_head, jnp.zeros_like(head_VD), "the head is frozen: None, or zeros, stands for its gradient")
        program = jax.make_jaxpr(jax.grad(lambda x: loss(x, head_VD, targets_N)))(x_ND).jaxpr
        products = [eqn.outvars[0].aval for eqn, _ in equations(program) if eqn.primitive.name == "dot_general"]
        calls = sum(getattr(out, "shape", None) == x_ND.shape for out in products)  # each of them sweeps once
        assert calls == 1, f"forward and backward together call `sweep` {calls} times; all is known after one"
        _, pull = jax.vjp(lambda x: loss(x, head_VD, targets_N), x_ND)
        jax.vjp(lambda x: loss(x, head_VD, targets_N), 2 * x_ND)  # another forward pass before this one's backward
        hint = "the backward pass takes the gradient of another forward pass: what it needs, its own must return"
        _close(pull(jnp.ones(()))[0], jax.grad(lambda x: _plain(x, head_VD, targets_N))(x_ND), hint)
        _assert_little_kept(pull, x_ND)
        x_ND, head_VD, targets_N = _inputs(jnp.bfloat16)
        x_ND, head_VD, targets_N = x_ND[:8, :3], head_VD[:5, :3], targets_N[:8] % 5  # another size as well
        gradient = jax.grad(lambda x: loss(x, head_VD, targets_N) / 8)(x_ND)
        assert gradient.dtype == x_ND.dtype, "hidden states in bfloat16 want a gradient in bfloat16"
        _assert_little_kept(jax.vjp(lambda x: loss(x, head_VD, targets_N), x_ND)[1], x_ND)
        exact = jax.grad(lambda x: _plain(x, head_VD, targets_N) / 8)(x_ND.astype(jnp.float32))
        assert np.allclose(gradient.astype(jnp.float32), exact, rtol=0.02, atol=0.002), (
            "in bfloat16, and for other sizes, the gradient of the hidden states is wrong"
        )
        _assert_cotangent_whole(fn)
        return "One sweep, one residual, no head in the backward pass at all."

    grade(3, body)


def _assert_cotangent_whole(fn: Callable[..., Any]) -> None:
    """Raise AssertionError where the cotangent is rounded to the type of x, before it multiplies the gradient."""
    x_ND, tokens = jnp.zeros((255, 4), jnp.bfloat16), 255  # 1 / 255 is 1 / 256 in bfloat16
    loss = fn(lambda x_ND, *_: (jnp.zeros(()), jnp.full(x_ND.shape, 1.5)))
    found = jax.grad(lambda x: loss(x, jnp.zeros((3, 4), x.dtype), jnp.zeros(255, int)) / tokens)(x_ND)
    assert np.all(found == jnp.bfloat16(1.5 / tokens)), (
        "in bfloat16 the whole gradient is a little off, all of it by the same part. `sweep` gave 1.5 everywhere, a "
        f"mean over {tokens} tokens makes it {jnp.bfloat16(1.5 / tokens):.6f} in bfloat16, yours is "
        f"{float(found.ravel()[0]):.6f}: 1 / {tokens} was rounded to 8 bits first. In which type does the number that "
        "multiplies everything arrive, and in which is it used?"
    )


def _assert_little_kept(pull: Any, x_ND: Any) -> None:
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept <= x_ND.nbytes, (
        f"between forward and backward {kept} bytes are kept. What does the backward pass multiply, and how many bytes "
        f"has that? (x has {x_ND.nbytes}, in {x_ND.dtype}.)"
    )


def _logits(x_ND: Any, head_VD: Any) -> Any:
    return x_ND.astype(jnp.float32) @ head_VD.astype(jnp.float32).T


def _plain(x_ND: Any, head_VD: Any, targets_N: Any) -> Any:
    logp_NV = jax.nn.log_softmax(_logits(x_ND, head_VD))
    return -jnp.take_along_axis(logp_NV, targets_N[:, None], 1).sum()


def _inputs(dtype: Any) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(2), 2)
    x_ND, head_VD = (jax.random.normal(k, shape, dtype) for k, shape in zip(keys, [(12, 4), (7, 4)], strict=True))
    return x_ND, head_VD, jnp.arange(12) % 7


def _close(actual: Any, expected: Any, hint: str) -> None:
    assert getattr(actual, "shape", None) == expected.shape, f"the shape must be {expected.shape}; {hint}"
    assert np.allclose(actual, expected, rtol=1e-4, atol=1e-5), hint
