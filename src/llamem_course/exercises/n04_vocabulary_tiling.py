"""The exercises of notebook 04."""

import math
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


def _weighed(weight: Answer, own: Answer = lambda c, lse_N: 1) -> Answer:
    """Return the gradient with other weights, of c and logsumexp, on the softmax and on the own word."""

    def gradient(z: Any, words: Any, lse: Any, y: Any, c: Any) -> Any:
        hot = y[:, None] == words
        own_N = jnp.broadcast_to(own(c, lse), lse.shape)
        return jnp.exp(z - lse[:, None]) * weight(c, lse)[:, None] - own_N[:, None] * hot

    return gradient


_of_tile = _weighed(lambda c, lse_N: 1 + 2 * c * lse_N)  # the right answer


def _at_index(index: Answer) -> Answer:
    """Return the gradient with the own word found by an index into the tile."""

    def gradient(z: Any, words: Any, lse: Any, y: Any, c: Any) -> Any:
        others = _of_tile(z, words, lse, jnp.full_like(y, -1), c)
        return others.at[jnp.arange(len(y)), index(y, words)].add(-1)

    return gradient


def _tile(z_NV: Any, first: int, end: int, c: float) -> tuple[Any, ...]:
    return z_NV[:, first:end], jnp.arange(first, end), jax.nn.logsumexp(z_NV, axis=1), _TARGETS_N, c


_Z_NV = jax.random.normal(jax.random.key(0), (6, 9))
_TARGETS_N = jnp.array([0, 4, 3, 8, 1, 5])

check_tile_gradient = Exercise(
    2,
    _of_tile,
    {
        "With a c of 0, in the tile of the first four words": _tile(_Z_NV, 0, 4, 0.0),
        "With a c of 0, in a tile that begins with word 4": _tile(_Z_NV, 4, 8, 0.0),
        "With a c of 0.1": _tile(_Z_NV, 4, 8, 0.1),
        "With a c of 0.02, in a tile of two words": _tile(_Z_NV, 3, 5, 0.02),
        "With logits of 200": _tile(200 * _Z_NV / _Z_NV.max(), 4, 8, 0.1),
    },
    "The tile needs only the logsumexp that it had. `llamem.tiled_cross_entropy` has this as `z_loss`.",
    {
        "It must be the gradient of the sum of the losses: compare sign and size.": [
            lambda *given: -_of_tile(*given),
            lambda *given: _of_tile(*given) / len(given[0]),
        ],
        "A softmax is over all words. Which of the numbers given knows of the words outside this tile?": [
            lambda z, words, lse, *given: _of_tile(z, words, jax.nn.logsumexp(z, axis=1), *given),
            lambda z, words, lse, y, c: jax.nn.softmax(z) * (1 + 2 * c * lse)[:, None] - (y[:, None] == words),
            lambda z, words, lse, *given: _of_tile(z, words, lse, *given) / jnp.exp(z - lse[:, None]).sum(1)[:, None],
        ],
        "Which tokens have their target in this tile, and at which place? An id counts from the first word of all.": [
            lambda z, words, lse, y, c: _of_tile(z, jnp.arange(len(words)), lse, y, c),
            _at_index(lambda y, words: y % len(words)),
            _at_index(lambda y, words: jnp.clip(y - words[0], 0, len(words) - 1)),
            _at_index(lambda y, words: y - words[0]),
        ],
        "Your answer does not change with c. Which term of the loss has it?": (
            lambda z, words, lse, y, c: _of_tile(z, words, lse, y, 0)
        ),
        "By the chain rule: what is the derivative of a square, and what stands inside?": [
            _weighed(lambda c, lse: 1 + c * lse),
            _weighed(lambda c, lse: 1 + c * lse**2),
            _weighed(lambda c, lse: 1 + 2 * c + 0 * lse),
            _weighed(lambda c, lse: 1 + 2 * lse * (c > 0)),
            lambda z, words, lse, y, c: _of_tile(z, words, lse, y, 0) + 2 * c * lse[:, None],
        ],
        "Does the z-loss know which word was the target?": (
            _weighed(lambda c, lse: 1 + 2 * c * lse, lambda c, lse: 1 + 2 * c * lse)
        ),
        "Logsumexp of which logits: those of the tile, or of all words?": (
            lambda z, words, lse, y, c: (
                jnp.exp(z - lse[:, None]) * (1 + 2 * c * jax.nn.logsumexp(z, axis=1))[:, None] - (y[:, None] == words)
            )
        ),
        "Right for a c of 0.1, wrong for 0.02: is a number written into your answer?": (
            lambda z, words, lse, y, c: _of_tile(z, words, lse, y, 0.1 * (c > 0))
        ),
        "What is exp of 200 in float32? Subtract first.": (
            lambda z, words, lse, y, c: (
                jnp.exp(z) / jnp.exp(lse)[:, None] * (1 + 2 * c * lse)[:, None] - (y[:, None] == words)
            )
        ),
    },
    otherwise="Softmax minus one-hot is there for a c of 0. What does the square add to the softmax, and where?",
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
