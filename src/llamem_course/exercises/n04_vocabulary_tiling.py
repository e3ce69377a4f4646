"""The exercises of notebook 04."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises.exercise import Answer, Exercise


def _crossing(width: int, vocab: int, num_tiles: int) -> float:
    return 4 * vocab * width / (2 * vocab - 4 * vocab / num_tiles)


def _both_sides(found: Any, _: float, width: int, vocab: int, num_tiles: int) -> str:
    more, less = 2 * float(found) * vocab, 4 * vocab * width + 4 * float(found) * vocab / num_tiles
    return f"with {float(found):,.2f} tokens all logits take {more:,.0f} bytes, tiles of tokens {less:,.0f}."


check_crossing = Exercise(
    1,
    _crossing,
    {
        f"A width of {width:,}, {vocab:,} words, {tiles} tiles": (width, vocab, tiles)
        for width, vocab, tiles in ((4096, 128_256, 16), (2048, 128_256, 16), (4096, 32_000, 16), (1024, 151_936, 4))
    },
    "The vocabulary cancels: the width and the tiles decide.",
    {
        "The tile of logits has been left out: it takes 4 * N * V / num_tiles bytes.": lambda d, v, n: 2 * d,
        "How many tiles is N cut into, the one that is alive among them?": lambda d, v, n: 4 * d / (2 - 4 / (n - 1)),
        "In a tile a logit takes four bytes, for the softmax.": lambda d, v, n: 4 * d / (2 - 2 / n),
        "Is the sum of the head's gradient in 16 bits, or in 32?": lambda d, v, n: 2 * d / (2 - 4 / n),
        "The tile stands on the side of the tiles: mind the sign.": lambda d, v, n: 4 * d / (2 + 4 / n),
        "That is the inverse; which side has N?": lambda *given: 1 / _crossing(*given),
        "Both sides have V as a factor, the sum as well as the logits.": [
            lambda d, v, n: v * _crossing(d, v, n),
            lambda d, v, n: _crossing(d, v, n) / v,
        ],
        "Return the fraction, unrounded.": [
            lambda *given: round(_crossing(*given)),
            lambda *given: math.ceil(_crossing(*given)),
        ],
    },
    otherwise="Write down both and solve for N; on which side does num_tiles stand?",
    told=_both_sides,
    rtol=1e-6,
)


def _smoothed(z_NV: Any, targets_N: Any, epsilon: Any, *, softmax: Any = jax.nn.softmax, words: Any = None) -> Any:
    share = epsilon / (words or z_NV.shape[1])
    return softmax(z_NV) - (1 - epsilon) * jax.nn.one_hot(targets_N, z_NV.shape[1]) - share


def _by_autodiff(z_NV: Any, targets_N: Any, epsilon: float) -> Any:
    def losses(z_NV: Any) -> Any:
        logp_NV = jax.nn.log_softmax(z_NV)
        picked_N = jnp.take_along_axis(logp_NV, targets_N[:, None], 1)[:, 0]
        return -jnp.sum((1 - epsilon) * picked_N + epsilon * logp_NV.mean(1))

    return jax.grad(losses)(z_NV)


def _mixture(own: Answer, share: Answer) -> Answer:
    """Return the gradient with other weights, of epsilon, tokens and words, on the own word and on all."""

    def gradient(z: Any, t: Any, eps: float) -> Any:
        return jax.nn.softmax(z) - own(eps) * jax.nn.one_hot(t, z.shape[1]) - share(eps, *z.shape)

    return gradient


def _by_words(z: Any, t: Any, eps: float) -> Any:
    hot = jax.nn.one_hot(t, z.shape[1])
    return jax.nn.softmax(z) - (1 - eps) * hot - eps / (z.shape[1] - 1) * (1 - hot)


def _unshifted(z: Any) -> Any:
    return jnp.exp(z) / jnp.exp(z).sum(1, keepdims=True)


def _row_sum(first: float) -> str:
    return "" if abs(first) < 0.005 else f"the sums of your rows begin with {first:.3f}."


_Z_NV = jax.random.normal(jax.random.key(0), (6, 5))
_TARGETS_N = jnp.array([0, 4, 2, 2, 1, 3])

check_smoothed_gradient = Exercise(
    2,
    _by_autodiff,
    {
        "With an epsilon of 0": (_Z_NV, _TARGETS_N, 0.0),
        "With an epsilon of 0.3": (_Z_NV, _TARGETS_N, 0.3),
        "With an epsilon of 0.1": (_Z_NV, _TARGETS_N, 0.1),
        "With 9 words in place of 5": (jax.random.normal(jax.random.key(1), (4, 9)), _TARGETS_N[:4], 0.3),
        "With logits of 200": (200 * _Z_NV[:4], _TARGETS_N[:4], 0.1),
    },
    "Every row still sums to 0: a mixture of targets weighs 1, and so does softmax.",
    {
        "It must be the gradient that this notebook derived, of the sum: compare sign, size, rows.": [
            lambda *given: -_by_autodiff(*given),
            lambda *given: _by_autodiff(*given) / len(given[0]),
            partial(_smoothed, softmax=jax.nn.log_softmax),
            partial(_smoothed, softmax=partial(jax.nn.softmax, axis=0)),
        ],
        "Epsilon changes nothing in your answer. Which term of the loss does it enter?": (
            lambda z, t, eps: _by_autodiff(z, t, 0.0)
        ),
        "You scaled the whole difference. Which of the two does a mixture of targets replace, softmax or targets?": (
            lambda z, t, eps: (1 - eps) * _by_autodiff(z, t, 0.0)
        ),
        "What does a mixture of targets weigh in all, and what must a row of the gradient then sum to?": [
            _mixture(lambda eps: 1, lambda eps, N, V: eps / V),
            _mixture(lambda eps: 1 - eps, lambda eps, N, V: 0),
            _mixture(lambda eps: 1 - eps, lambda eps, N, V: eps),
            _mixture(lambda eps: 1 - eps, lambda eps, N, V: eps / N),
        ],
        "The weight lies on the wrong words: 'all V' of the text includes the target.": _by_words,
        "Is it the softmax that is mixed, or the targets? One of the two is what the model says.": (
            lambda z, t, eps: (1 - eps) * jax.nn.softmax(z) + eps / z.shape[1] - jax.nn.one_hot(t, z.shape[1])
        ),
        "Right for an epsilon of 0.3, wrong for 0.1: is a number written into your answer?": (
            lambda z, t, eps: _smoothed(z, t, 0.3 * (eps > 0))
        ),
        "Is a number of words written into your answer?": partial(_smoothed, words=5),
        "What is exp of 200 in float32, and what does softmax do first, in each row?": [
            partial(_smoothed, softmax=_unshifted),
            partial(_smoothed, softmax=lambda z: _unshifted(z - z.max())),
            lambda z, *given: _smoothed(jnp.clip(z, -80, 80), *given),
        ],
    },
    otherwise="How much of a target's weight goes to which words, and does it all arrive?",
    told=lambda got, *_: _row_sum(np.asarray(got, float).sum(-1).ravel()[0]),
)


def _losses(x_ND: Any, head_VD: Any, targets_N: Any) -> Any:
    logp_NV = jax.nn.log_softmax(x_ND.astype(jnp.float32) @ head_VD.astype(jnp.float32).T)
    return -jnp.take_along_axis(logp_NV, targets_N[:, None], 1).sum()


def _openly(x_ND: Any, head_VD: Any, targets_N: Any) -> tuple[Any, Any]:
    """Sweep so that JAX can differentiate it."""
    z_NV = x_ND.astype(jnp.float32) @ head_VD.astype(jnp.float32).T
    d_NV = jax.nn.softmax(z_NV) - jax.nn.one_hot(targets_N, len(head_VD))
    return _losses(x_ND, head_VD, targets_N), d_NV @ head_VD.astype(jnp.float32)


def _sweep(*given: Any) -> tuple[Any, Any]:
    """Sweep so that JAX finds nothing to differentiate."""
    return jax.lax.stop_gradient(_openly(*given))


def _inputs(dtype: Any, tokens: int = 12, words: int = 7, width: int = 4) -> tuple[Any, Any, Any]:
    x_ND, head_VD = (
        jax.random.normal(jax.random.key(i), (rows, width), dtype) for i, rows in enumerate((tokens, words))
    )
    return x_ND, head_VD, jnp.arange(tokens) % words


def _under(frozen_loss: Answer, scale: float) -> tuple[Any, ...]:
    """Return the loss, plain and differentiated, and gradients of a larger loss around each of the two sweeps."""
    given, losses = _inputs(jnp.float32), [frozen_loss(sweep) for sweep in (_sweep, _openly)]
    assert callable(losses[0]), "Return the loss, a function of hidden states, head and targets."
    value = losses[0](*given)
    assert getattr(value, "shape", None) == (), "The loss is one number; its gradient is a residual, no second result."
    inner = [jax.value_and_grad(lambda *given, loss=loss: scale * loss(*given))(*given) for loss in losses]
    return value, inner[0][0] / scale, inner[0][1], inner[1][1]


def _vjp(
    backward: Answer = lambda dx, g: (g * dx).astype(dx.dtype),
    keep: Answer = lambda dx, x, *_: dx.astype(x.dtype),
    forward_value: Answer = lambda value, x: value,
    for_head: Answer = lambda: None,
) -> Answer:
    """Return a `frozen_loss` by custom_vjp, right but for what is given."""

    def frozen_loss(sweep: Answer) -> Answer:
        @jax.custom_vjp
        def loss(*given: Any) -> Any:
            return sweep(*given)[0]

        def forward(*given: Any) -> tuple[Any, Any]:
            value, dx = sweep(*given)
            return forward_value(value, given[0]), keep(dx, *given)

        loss.defvjp(forward, lambda kept, g: (backward(kept, g), for_head(), None))
        return loss

    return frozen_loss


def _surrogate(sweep: Answer) -> Answer:
    """Add a term that is 0, and whose derivative is the gradient that was made."""

    def loss(x: Any, head: Any, targets: Any) -> Any:
        value, dx = sweep(x, head, targets)
        return value + jnp.sum((x - jax.lax.stop_gradient(x)) * dx.astype(x.dtype))

    return loss


def _head_is_frozen(frozen_loss: Answer) -> None:
    try:
        for_head = jax.grad(frozen_loss(_sweep), argnums=1)(*_inputs(jnp.float32))
    except jax.errors.UnexpectedTracerError:  # a loss of x alone around the others: nobody asked for more
        return
    assert not np.any(for_head), "The head is frozen: None, or zeros, stands for its gradient."


def _one_sweep(frozen_loss: Answer) -> None:
    x_ND, head_VD, targets_N = _inputs(jnp.float32)
    loss = frozen_loss(_sweep)
    program = jax.make_jaxpr(jax.grad(lambda x: loss(x, head_VD, targets_N)))(x_ND).jaxpr
    products = [eqn.outvars[0].aval for eqn, _ in equations(program) if eqn.primitive.name == "dot_general"]
    calls = sum(getattr(out, "shape", None) == x_ND.shape for out in products)  # each of them sweeps once
    assert calls == 1, f"Forward and backward together call `sweep` {calls} times; all is known after one."


def _little_is_kept(frozen_loss: Answer) -> None:
    x_ND, *given = _inputs(jnp.bfloat16)
    pull = jax.vjp(lambda x: frozen_loss(_sweep)(x, *given), x_ND)[1]
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept <= x_ND.nbytes, (
        f"Between forward and backward {kept} bytes are kept. What does the backward pass multiply, and how many bytes "
        f"has that? (x has {x_ND.nbytes}, in {x_ND.dtype}.)"
    )


def _cotangent_is_whole(frozen_loss: Answer) -> None:
    x_ND, tokens = jnp.zeros((255, 4), jnp.bfloat16), 255  # 1 / 255 is 1 / 256 in bfloat16
    loss = frozen_loss(lambda x_ND, *_: (jnp.zeros(()), jnp.full(x_ND.shape, 1.5)))
    found = jax.grad(lambda x: loss(x, jnp.zeros((3, 4), x.dtype), jnp.zeros(255, int)) / tokens)(x_ND)
    assert found.dtype == x_ND.dtype, "Hidden states in bfloat16 want a gradient in bfloat16."
    assert np.all(found == jnp.bfloat16(1.5 / tokens)), (
        f"`sweep` gave 1.5 everywhere, and a mean over {tokens} tokens makes it {jnp.bfloat16(1.5 / tokens):.6f} in "
        f"bfloat16. Yours is {float(found.ravel()[0]):.6f}: 1 / {tokens} was rounded to 8 bits first. In which type "
        "does the number that multiplies everything arrive, and in which is it used?"
    )


def _times(got: Any, expected: Any, scale: float) -> str:
    gradient = expected[2]
    if getattr(got[2], "shape", None) != gradient.shape:
        return f"the gradient of the hidden states has their shape, {gradient.shape}."
    factor = float(jnp.vdot(got[2], gradient) / jnp.vdot(gradient, gradient))
    return f"your gradient is {factor:.3g} times the right one; the loss is multiplied by {scale:.3g} after yours."


check_frozen_loss = Exercise(
    3,
    lambda sweep: _losses,
    {
        "Under a sum": (1.0,),
        "Under a mean": (1 / 12,),
        "In a loss that is subtracted": (-1 / 3,),
        "With a loss scale": (1024.0,),
    },
    "One sweep, one residual, no head in the backward pass at all.",
    {
        "Return the loss, a function of": lambda sweep: sweep(*_inputs(jnp.float32)),
        "its gradient is a residual, no second result": lambda sweep: sweep,
        "JAX finds nothing in `sweep` to differentiate. Which tool gives it the gradient that `sweep` returns?": (
            lambda sweep: lambda *given: sweep(*given)[0]
        ),
        "The gradient is 0. Does something stop it, or does your backward pass hand on zeros?": [
            _vjp(backward=lambda dx, g: 0 * dx),
            lambda sweep: lambda *given: jax.lax.stop_gradient(sweep(*given)[0]),
        ],
        "By which way does your backward pass learn of that number, and is it used once, with its sign?": [
            _vjp(backward=lambda dx, g: dx),
            _vjp(backward=lambda dx, g: g * g * dx),
            _vjp(backward=lambda dx, g: abs(g) * dx),
        ],
        "`sweep` gives the gradient of a sum. Who makes a mean of it, this loss or the one around it?": (
            _vjp(backward=lambda dx, g: g * dx / len(dx))
        ),
        "Where JAX can differentiate `sweep` itself, does the gradient come twice?": _surrogate,
        "The value is that of `sweep` while nobody differentiates; what does your forward pass return first?": (
            _vjp(forward_value=lambda value, x: value / len(x))
        ),
    },
    {
        _head_is_frozen: {"zeros, stands for": _vjp(for_head=lambda: jnp.ones((7, 4)))},
        _one_sweep: {
            "2 times": [
                lambda sweep: _vjp()(lambda *given: (sweep(*given)[0], sweep(*given)[1])),
                lambda sweep: _vjp(lambda kept, g: (g * sweep(*kept)[1]).astype(kept[0].dtype), lambda _, *x: x)(sweep),
            ]
        },
        _little_is_kept: {
            "bytes are kept": _vjp(keep=lambda dx, *_: dx),
            "What does the backward pass": _vjp(lambda kept, g: g * kept[0], lambda dx, x, head, _: (dx, head)),
            "in bfloat16": _vjp(lambda kept, g: (g * kept[0]).astype(kept[1].dtype), lambda dx, x, *_: (dx, x[:0])),
        },
        _cotangent_is_whole: {
            "was rounded to 8 bits": [
                _vjp(lambda dx, g: g.astype(dx.dtype) * dx),
                lambda sweep: _surrogate(lambda *g: jax.lax.stop_gradient(sweep(*g))),
            ],
        },
    },
    otherwise="The value is that of `sweep`; the gradient is the one that it returns, in a larger loss as well.",
    ask=_under,
    told=_times,
    rtol=1e-4,
)
