"""The exercises of notebook 09."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import matmul_flops
from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises import largest_array, operations_written
from llamem_course.exercises.exercise import Answer, Exercise

F32, BF16 = jnp.float32, jnp.bfloat16


def _drawn(seed: int, *shapes: tuple[int, ...]) -> Iterator[Any]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def _merged(w_DF: Any, down_DR: Any, up_RF: Any, scale: Any) -> Any:
    return (w_DF.astype(F32) + scale * (down_DR @ up_RF)).astype(w_DF.dtype)


def _in_its_place(answer: Answer, w_DF: Any, *given: Any) -> Any:
    found = answer(w_DF, *given)
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    assert shape == w_DF.shape, f"a matrix that takes another's place has its shape, {w_DF.shape}; got {shape}."
    assert dtype == w_DF.dtype, (
        f"the matrix was {w_DF.dtype}, yours is {dtype}: which type must a weight have that takes another's place?"
    )
    return found


_W_DF, _DOWN_DR, _UP_RF = _drawn(3, (48, 40), (48, 3), (3, 40))

check_merged_weight = Exercise(
    1,
    _merged,
    {
        "With a scale of 1": (_W_DF, _DOWN_DR, _UP_RF, 1.0),
        "With a scale of 2.5": (_W_DF, _DOWN_DR, _UP_RF, 2.5),
        "With a scale of -0.5 and no weight": (0 * _W_DF, _DOWN_DR, _UP_RF, -0.5),
        "In bfloat16": (_W_DF.astype(BF16), _DOWN_DR, _UP_RF, 0.3),
    },
    "One matrix, and nothing beside it: a merged model costs what the plain one did.",
    {
        "has its shape": lambda *given: _merged(*given).T,
        "which type must a weight have": lambda w, d, u, s: w.astype(F32) + s * d @ u,
        "This is what the adapter adds. What becomes of the weights that it is added to?": lambda w, d, u, s: s * d @ u,
        "x times your matrix must be x W + s (x down) up. What do you add, and with which sign?": [
            lambda w, *_: w,
            lambda w, d, u, s: _merged(w, d, u, -s),
        ],
        "What you add is divided by the rank. Is `scale` LoRA's alpha, or is it already alpha / r?": (
            lambda w, d, u, s: _merged(w, d, u, s / d.shape[1])
        ),
        "Right with a scale of 1: what is multiplied by it, and what is not?": [
            lambda w, d, u, s: _merged(w, d, u, 1.0),
            lambda w, d, u, s: s * _merged(w, d, u, 1.0),
        ],
        "Right with scales above zero, and not with one below: the scale is a factor, once.": (
            lambda w, d, u, s: _merged(w, d, u, abs(s))
        ),
        "In which type do you add, and how often is a number rounded on its way?": [
            lambda w, d, u, s: w + (s * d @ u).astype(w.dtype),
            lambda w, d, u, s: _merged(w, d.astype(w.dtype), u.astype(w.dtype), s),
        ],
    },
    otherwise="x times your matrix must be x W + s (x down) up; in which type is that computed?",
    ask=_in_its_place,
)


def _layer(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    """Compute a sequence at a time."""
    rows = [row @ w + scale[a] * (row @ down[a]) @ up[a] for row, a in zip(x, adapter, strict=True)]
    return jnp.stack(rows)


def _adapted(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    """Compute all sequences at once."""
    z = jnp.einsum("BTD,BDR->BTR", x, down[adapter]) * scale[adapter][:, None, None]
    return x @ w + jnp.einsum("BTR,BRF->BTF", z, up[adapter])


def _layer_inputs(B: int, T: int, D: int, F: int, R: int, A: int) -> tuple[Any, ...]:
    return tuple(_drawn(0, (B, T, D), (D, F), (A, D, R), (A, R, F)))


B, T, D, F, R, A = 5, 6, 16, 24, 3, 4
_SCALE_A, _ADAPTER_B = jnp.array([1.0, 0.5, 3.0, -2.0]), jnp.array([2, 0, 3, 3, 1])
_GIVEN = (*_layer_inputs(B, T, D, F, R, A), _SCALE_A, _ADAPTER_B)
_MORE = (*_layer_inputs(B + 3, T + 2, D, F, R, A), _SCALE_A, jnp.arange(B + 3) % A)


def _thin_side_between(answer: Answer) -> None:
    largest = largest_array(jax.make_jaxpr(answer)(*_GIVEN).jaxpr)
    assert largest < 2 * D * F, (
        f"right, but an array of {largest} numbers appears on the way, where the layer's weight has {D * F}: you merge "
        "weights, or copy an adapter for each token. In which order must three matrices be multiplied so that the "
        "narrow side stays in between, and how often must an adapter be fetched for one sequence?"
    )


def _own_adapter_alone(answer: Answer) -> None:
    needed, flops = 2 * B * T * (D * F + R * (D + F)), matmul_flops(jax.make_jaxpr(answer)(*_GIVEN).jaxpr)
    assert flops < 1.05 * needed, (
        f"right, but the matmuls take {flops} FLOPs where {needed} are enough: every sequence meets adapters that are "
        "not its own, or weights are merged one by one."
    )


def _one_large_matmul(answer: Answer) -> None:
    runs = []
    for given in (_GIVEN, _MORE):
        program = [one for one in equations(jax.make_jaxpr(answer)(*given).jaxpr) if _multiplies(one[0], (D, F))]
        runs.append(sum(times for _, times in program))
    assert runs[0] == runs[1], (
        f"right, but the matmul with the whole weight runs {runs[0]} times for {B} sequences, and {runs[1]} times for "
        f"{B + 3}. Nobody's adapter changes that weight: can the large matmul not run once for all?"
    )


def _multiplies(eqn: Any, shape: tuple[int, ...]) -> bool:
    return eqn.primitive.name == "dot_general" and any(getattr(v.aval, "shape", ()) == shape for v in eqn.invars)


def _no_loop_of_pythons(answer: Answer) -> None:
    few, many = (operations_written(answer, *given) for given in (_GIVEN, _MORE))
    assert many < 1.2 * few, (
        f"right, but the program has {few} operations for {B} sequences, and {many} for {B + 3}. It grows with the "
        "sequences, as Python's loops do, and so does the time to compile it: what works on all of them at once?"
    )


def _gradients(answer: Answer) -> None:
    x, w, down, up, *rest = _GIVEN
    reasons = {"up_ARF": "it is what a fine-tune trains", "down_ADR": "it is what a fine-tune trains"}
    reasons |= {"x": "layers below must still learn"}  # what is not trained leaves x without its part as well

    def slopes(of: Answer) -> Any:
        return jax.grad(lambda up, down, x: jnp.sum(jnp.sin(of(x, w, down, up, *rest))), (0, 1, 2))(up, down, x)

    for (name, why), ours, theirs in zip(reasons.items(), slopes(answer), slopes(_layer), strict=True):
        assert np.allclose(ours, theirs, rtol=1e-3, atol=1e-4), (
            f"the numbers are right, the gradient of {name} is not: {why}."
        )


def _merged_for_each(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    delta = jnp.einsum("BDR,BRF->BDF", down[adapter], up[adapter]) * scale[adapter][:, None, None]
    return jnp.einsum("BTD,BDF->BTF", x, w + delta)


def _every_adapter(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    z = jnp.einsum("BTD,ADR->BATR", x, down) * scale[:, None, None]
    return x @ w + jnp.einsum("BATR,ARF,BA->BTF", z, up, jax.nn.one_hot(adapter, len(scale)))


def _each_tokens_copy(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    z = (x[..., None] * down[adapter][:, None]).sum(2)
    return x @ w + scale[adapter][:, None, None] * (z @ up[adapter])


def _thin_matmuls_in_a_loop(x: Any, w: Any, down: Any, up: Any, scale: Any, adapter: Any) -> Any:
    return x @ w + jnp.stack([scale[a] * (row @ down[a]) @ up[a] for row, a in zip(x, adapter, strict=True)])


def _one_at_a_time(given: Any, w: Any, down: Any, up: Any, scale: Any) -> Any:
    row, a = given
    return row @ w + scale[a] * (row @ down[a]) @ up[a]


check_adapted = Exercise(
    2,
    _layer,
    {
        "With adapter 1 for every sequence and scales of 1": (*_GIVEN[:4], jnp.ones(A), jnp.full(B, 1)),
        "With an adapter for each sequence": (*_GIVEN[:4], jnp.ones(A), _ADAPTER_B),
        "With scales of their own": _GIVEN,
        "With 7 adapters of rank 5": (*_layer_inputs(3, 2, 12, 8, 5, 7), jnp.arange(1.0, 8.0), jnp.array([6, 1, 4])),
    },
    "Nothing of the weight's size was made but the weight, and no sequence met a foreign adapter.",
    {
        "It must be the LoRA that you built above, the weight and what an adapter adds.": [
            lambda x, w, *_: x @ w,
            lambda x, w, *rest: _layer(x, w, *rest) - x @ w,
        ],
        "One adapter for all is right, one for each sequence is not: which axis of `down` and `up` does it choose?": [
            lambda x, w, d, u, s, a: _layer(x, w, d, u, s, jnp.full_like(a, a[0])),
            lambda x, w, d, u, s, a: _layer(x, w, d, u, s, jnp.sort(a)),
        ],
        "Each adapter has a scale of its own: what does it multiply, once, and along which axis must it lie?": [
            lambda x, w, d, u, s, a: s[a][:, None, None] * _layer(x, w, d, u, jnp.ones_like(s), a),
            lambda x, w, d, u, s, a: _layer(x, w, d, u, jnp.ones_like(s), a),
            lambda x, w, d, u, s, a: _layer(x, w, d, u, s * s, a),
            lambda x, w, d, u, s, a: _layer(x, w, d, u, 0 * s + s.mean(), a),
        ],
        "With 4 adapters of rank 3 you are right: which number have you written down?": [
            lambda x, w, d, u, s, a: _adapted(x, w, d[:4], u[:4], s[:4], a),
            lambda x, w, d, u, s, a: _layer(x, w, d[..., :3], u[:, :3], s, a),
        ],
    },
    {
        _thin_side_between: {"you merge weights": _merged_for_each, "an array of 1440 numbers": _each_tokens_copy},
        _own_adapter_alone: {
            "not its own": _every_adapter,
            "one by one": lambda x, w, d, u, s, a: jax.lax.map(
                lambda one: one[0] @ (w + s[one[1]] * d[one[1]] @ u[one[1]]), (x, a)
            ),
        },
        _one_large_matmul: {
            "once for all": [
                _layer,
                lambda x, w, d, u, s, a: jax.lax.map(partial(_one_at_a_time, w=w, down=d, up=u, scale=s), (x, a)),
            ]
        },
        _no_loop_of_pythons: {
            "as Python's loops do": _thin_matmuls_in_a_loop,
        },
        _gradients: {
            "gradient of down_ADR is not": [
                lambda x, w, d, u, s, a: _adapted(x, w, jax.lax.stop_gradient(d), u, s, a),
                lambda x, w, d, u, s, a: x @ w + s[a][:, None, None] * (jax.lax.stop_gradient(x @ d[a]) @ u[a]),
            ],
            "layers below": lambda x, w, d, u, s, a: (
                x @ w + s[a][:, None, None] * (jax.lax.stop_gradient(x) @ d[a]) @ u[a]
            ),
        },
    },
    otherwise="A sequence meets the weight and its own adapter, and nothing else.",
    rtol=1e-4,
)


def _number_by_number(values: Any, scale: Any, dtype: Any) -> Any:
    numbers = np.zeros((len(values), 32 * values.shape[1]), np.float32)
    for row, block, byte in np.ndindex(*values.shape):
        both, stretch = int(values[row, block, byte]), np.float32(scale[row, block])
        numbers[row, 32 * block + byte] = stretch * ((both & 15) - 8)
        numbers[row, 32 * block + byte + 16] = stretch * ((both >> 4) - 8)
    return jnp.asarray(numbers).astype(dtype)


def _side_by_side(values: Any) -> Any:
    return jnp.concatenate([values & 15, values >> 4], axis=-1)


def _unpacked(
    values: Any,
    scale: Any,
    dtype: Any,
    *,
    numbers: Answer = _side_by_side,
    minus: Answer = lambda q: q.astype(F32) - 8,
    wide: Any = F32,
    stretched: Answer = lambda q, scale: q * scale[..., None],
) -> Any:
    """Return the matrix, right but for what is given."""
    q = minus(numbers(values).reshape(*values.shape[:2], 32)).astype(wide)
    return stretched(q, scale.astype(wide)).reshape(len(values), -1).astype(dtype)


def _but(**mistake: Any) -> Answer:
    return partial(_unpacked, **mistake)


def _of_scale(change: Answer) -> Answer:
    return lambda values, scale, dtype: _unpacked(values, change(scale), dtype)


def _matrix(n_out: int, n_in: int, seed: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    scale = draw.uniform(0.01, 0.1, (n_out, n_in // 32)).astype(np.float16)
    return jnp.asarray(draw.integers(0, 256, (n_out, n_in // 32, 16)), jnp.uint8), jnp.asarray(scale)


def _rows(answer: Answer, values: Any, scale: Any, dtype: Any) -> Any:
    found, expected = answer(values, scale, dtype), (len(values), 32 * values.shape[1])
    shape = getattr(found, "shape", None)
    assert shape == expected, f"return a row of numbers for each output, {expected}; got {shape}."
    assert found.dtype == dtype, f"asked for {jnp.dtype(dtype)}, you returned {found.dtype}."
    return found


def _in_jit(answer: Answer) -> None:
    values, scale = _matrix(5, 96, 1)
    try:
        found = jax.jit(answer, static_argnums=2)(values, scale, F32)
    except TypeError:  # what JAX raises where a traced array is asked for its numbers
        raise AssertionError(
            "right, but not inside `jit`, where arrays have a shape and no numbers yet: what in your answer asks for a "
            "number, or for an array of NumPy's?"
        ) from None
    assert np.allclose(found, _unpacked(values, scale, F32)), "right, but other numbers come out inside `jit`."


def _all_blocks_at_once(answer: Answer) -> None:
    few, many = (
        operations_written(lambda v, s: answer(v, s, F32), *_matrix(*size, 2)) for size in ((3, 64), (12, 256))
    )
    assert many < 1.5 * few, (
        f"right, but the program has {few} operations for a small matrix, and {many} for a larger one: a loop of "
        "Python's leaves every turn in it. A matrix of the 8B model has half a million blocks; which operations work "
        "on all of them at once?"
    )


def _in_numpy(values: Any, scale: Any, dtype: Any) -> Any:
    values, scale = np.asarray(values), np.asarray(scale, np.float32)
    q = np.concatenate([values & 15, values >> 4], axis=-1).astype(np.float32) - 8
    return jnp.asarray((q * scale[..., None]).reshape(len(values), -1)).astype(dtype)


check_dequantized = Exercise(
    3,
    _number_by_number,
    {
        f"{n_out} outputs of {n_in} inputs in {jnp.dtype(dtype)}": (*_matrix(n_out, n_in, seed), dtype)
        for n_out, n_in, seed, dtype in ((3, 64, 0, F32), (5, 96, 1, F32), (3, 64, 0, BF16))
    },
    "These are the numbers that llama.cpp reads from a file of Q4_0, to the last bit.",
    {
        "return a row of numbers": lambda *given: _unpacked(*given).reshape(len(given[0]), -1, 32),
        "asked for bfloat16": lambda v, s, dtype: _unpacked(v, s, F32),
        "Four bits count from 0, and weights have two signs. Which q stands for zero?": [
            _but(minus=lambda q: q),
            _but(minus=lambda q: q - 7.5),
            _but(minus=lambda q: jnp.where(q > 7, q.astype(F32) - 16, q)),
        ],
        "These are whole numbers, the same in each block. What does a block bring along to stretch them?": (
            _of_scale(jnp.ones_like)
        ),
        "Of which type is `values`, and what does it hold when you take 8 from 3?": _but(minus=lambda q: q - 8),
        "A byte holds two numbers: how do you get at one alone?": [
            _but(numbers=lambda v: jnp.concatenate([v, v >> 4], axis=-1)),
            _but(numbers=lambda v: jnp.concatenate([v & 15, (v.astype(jnp.int8) >> 4).astype(jnp.uint8)], axis=-1)),
        ],
        "What comes first, the 8 or the scale, and is the scale a factor?": [
            _but(minus=lambda q: q, stretched=lambda q, scale: q * scale[..., None] - 8),
            _but(stretched=lambda q, scale: q / scale[..., None]),
        ],
        "The two halves of each block stand side by side: which axis do you join them along?": (
            _but(numbers=lambda v: jnp.concatenate([v & 15, v >> 4], axis=1))
        ),
        "All numbers are there, in another order: the high bits of a byte are not the neighbour of its low bits, but "
        "the number 16 further on.": [
            _but(numbers=lambda v: jnp.stack([v & 15, v >> 4], axis=-1)),
            _but(numbers=lambda v: jnp.stack([v >> 4, v & 15], axis=-1)),
        ],
        "All numbers are there, and the two halves of each block have changed places: which of a byte's bits hold the "
        "first sixteen weights?": _but(numbers=lambda v: jnp.concatenate([v >> 4, v & 15], axis=-1)),
        "Does each block of 32 meet its own scale, and each output its own row?": [
            _of_scale(lambda scale: 0 * scale + scale[:, :1]),
            _of_scale(lambda scale: 0 * scale + scale[0, 0]),
            lambda values, *given: _unpacked(values, *given).reshape(-1, len(values)).T,
        ],
        "A scale times a number has more digits than float16. Where does your answer leave float16?": (
            lambda v, s, dtype: _unpacked(v, s, jnp.float16, wide=jnp.float16).astype(dtype)
        ),
        "In float32 you are right, in bfloat16 some numbers are rounded twice: where does the type change?": [
            lambda v, s, dtype: _unpacked(v, s.astype(dtype), dtype),
            lambda v, s, dtype: _unpacked(v, s, dtype, wide=dtype),
        ],
    },
    {
        _in_jit: {"inside `jit`": [_number_by_number, _in_numpy]},
        _all_blocks_at_once: {
            "leaves every turn in it": lambda v, s, dtype: jnp.stack(
                [_unpacked(v[i : i + 1], s[i : i + 1], dtype)[0] for i in range(len(v))]
            ),
        },
    },
    otherwise="Do you compute in float32, and does each block of 32 meet its own scale?",
    ask=_rows,
    rtol=1e-6,
)
