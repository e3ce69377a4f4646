"""Checks of the exercises of notebook 05. The devices of a mesh are the rows of a `jax.vmap` with an axis name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.memory.hlo import parse
from llamem.memory.jaxprs import equations

DEVICES, AXIS = 4, "tensor"


def _share(operation: str, n: int) -> float:
    """Bytes that arrive at each of `n` devices of a ring, for each byte of the result."""
    return {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[operation]


# Bytes that arrive at a device of a ring, for each byte of a collective's result, by JAX's names.
ARRIVES = dict.fromkeys(("psum", "pmax", "pmin"), _share("all-reduce", DEVICES))
ARRIVES |= dict.fromkeys(("all_gather", "all_to_all"), _share("all-gather", DEVICES))
ARRIVES |= {"reduce_scatter": _share("reduce-scatter", DEVICES), "ppermute": 1.0}
# Exercise 1: lines with devices, runs and a question. The first five are the notebook's, others made up.
_EIGHT = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
LINES = (
    (
        f"%all_gather.3 = f32[4096,32]{{0,1}} all-gather(%wrapped_copy), channel_id=1, {_EIGHT}, dimensions={{1}}",
        (8, 1),
        "Which part of the result did the device have already?",
    ),
    (
        f"%reduce_scatter.7 = f32[4096,4]{{0,1}} reduce-scatter(%wrapped_copy.2), channel_id=1, {_EIGHT}",
        (8, 1),
        "The result is one device's part of the sum. How much arrived to be added into it?",
    ),
    (
        f"%psum.7 = f32[] all-reduce(%wrapped_reduce), channel_id=1, {_EIGHT}, to_apply=%region_7.8",
        (8, 1),
        "A shape without sizes is one number. And an all-reduce is one collective followed by another.",
    ),
    (
        "%all-reduce.3 = f32[128,4096]{1,0} all-reduce(%ynn_fusion.3), channel_id=2, "
        "replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}, use_global_device_ids=true",
        (8, 8),
        "It stands in the body of a loop. How often is it sent?",
    ),
    (
        "%all-reduce = (f32[], f32[4096,32]{1,0}) all-reduce(%wrapped_reduce, %get-tuple-element.44), channel_id=1, "
        + _EIGHT,
        (8, 1),
        "How many arrays are in this result?",
    ),
    (
        "%gathered.1 = bf16[1024,512]{1,0} all-gather(%slice.2), channel_id=5, replica_groups=[1,4]<=[4], "
        "dimensions={1}",
        (4, 1),
        "How many bytes has one element of this type? And how many devices take part?",
    ),
    (
        "%all-gather.clone.2 = f32[64,48]{1,0} reduce-scatter(%all-reduce.9), channel_id=3, "
        "replica_groups=[1,4]<=[4], dimensions={1}",
        (4, 32),
        "What stands in front of the equals sign is a name, and so is what stands in the parentheses. Where does the "
        "line say what it does?",
    ),
    (
        "%psum.3 = (bf16[8,2048]{1,0}, f32[2048]{0}) all-reduce(%fusion.8, %fusion.9), channel_id=7, "
        "replica_groups={{0,1},{2,3}}",
        (2, 8),
        "Each array of a tuple has a type of its own.",
    ),
)


def check_bytes_that_arrive(fn: Callable[[str, int, int], float]) -> None:
    """Exercise 1: what a line of a compiled program brings to a device, compared with the library's own reader."""

    def body() -> str:
        for line, (n, trips), question in LINES:
            found = fn(line, n, trips)
            assert found is not None and np.ndim(found) == 0, "return one number: the bytes that arrive at one device"
            ((instruction,),) = parse(f"ENTRY %main () -> f32[] {{\n  {line}\n}}").computations.values()
            result = sum(shape.item_bytes * math.prod(shape.sizes) for shape in instruction.shapes)
            wanted = trips * result * _share(instruction.opcode, n)
            assert np.isclose(found, wanted, rtol=1e-6), (
                f"with n={n} and trips={trips} yours is {found / wanted:.3f} times what arrives by\n"
                f"  {line}\n{question}"
            )
        return "Shape, kind, devices, runs: with these four you can price any line of any compiled program."

    grade(1, body)


def check_merge_devices(fn: Callable[..., Any]) -> None:
    """Exercise 2: logsumexp and the softmax's mean of the head's rows, from what each device found in its own rows."""
    z_ENU = 60 * jax.random.normal(jax.random.key(0), (DEVICES, 6, 5))
    z_ENU = z_ENU.at[1, 2].set(-jnp.inf)  # a device whose words are all masked, for one token
    head_EUD = jax.random.normal(jax.random.key(1), (DEVICES, 5, 3))

    def sweep(z_NU: Any, head_UD: Any) -> tuple[Any, Any, Any]:
        top_N = z_NU.max(1)
        exp_NU = jnp.exp(z_NU - jnp.where(jnp.isinf(top_N), 0, top_N)[:, None])
        return top_N, exp_NU.sum(1), exp_NU @ head_UD

    def body() -> str:
        found = jax.vmap(sweep)(z_ENU, head_EUD)
        z_NV, head_VD = jnp.concatenate(z_ENU, 1), jnp.concatenate(head_EUD)
        lse_N, mean_ND = jax.nn.logsumexp(z_NV, 1), jax.nn.softmax(z_NV) @ head_VD
        result = _on_devices(fn, *found)
        assert isinstance(result, tuple) and len(result) == 2, (
            "return two arrays, logsumexp and the mean, in this order"
        )
        lse_EN, mean_END = result
        assert jnp.shape(lse_EN) == (DEVICES, 6), f"logsumexp is one number per token, not {jnp.shape(lse_EN)[1:]}"
        assert jnp.shape(mean_END) == (DEVICES, 6, 3), f"the mean is [N, D], not {jnp.shape(mean_END)[1:]}"
        same = np.allclose(lse_EN, lse_EN[0], rtol=1e-5, equal_nan=True)
        assert same, "the devices end with different answers: somewhere each of them goes on with its own numbers"
        hint = (
            "each device counted its exponentials from a maximum of its own; from which one does the sum of all count?"
        )
        assert np.allclose(lse_EN[0], lse_N, rtol=1e-5), hint
        hint = "logsumexp is right and the mean is not: its numerator counts from the same maximum as its denominator"
        assert np.allclose(mean_END[0], mean_ND, rtol=1e-4, atol=1e-5), hint
        arriving, enough = _arriving(fn, *(a[0] for a in found)), ARRIVES["psum"] * 4 * (2 * 6 + 6 * 3)
        assert arriving <= enough, (
            f"right, but in a ring {arriving:.0f} bytes arrive at each device where {enough:.0f} are enough. To be "
            "added up, numbers need not be collected first"
        )
        return "Two numbers and one row per token travel, whatever the size of the vocabulary."

    grade(2, body)


def check_transpose(fn: Callable[..., Any]) -> None:
    """Exercise 3: the transpose of gathering a matrix along its columns."""
    dw_EVD = jax.random.normal(jax.random.key(2), (DEVICES, 12, 8))

    def body() -> str:
        found = jnp.asarray(_on_devices(fn, dw_EVD))
        of_all, width = dw_EVD.sum(0), 8 // DEVICES
        own_EVd = jnp.stack(jnp.split(of_all, DEVICES, 1))
        assert found.shape != (DEVICES, *of_all.shape), (
            "every device ends with the gradient of the whole head. Which part of the head does it hold?"
        )
        assert found.shape == own_EVd.shape, (
            f"a device holds [V, D / devices] = {own_EVd.shape[1:]} of the head, and so of its gradient; yours is "
            f"{found.shape[1:]}. The head was gathered along its columns"
        )
        mine = jnp.stack([dw_EVD[i, :, i * width : (i + 1) * width] for i in range(DEVICES)])
        assert not np.allclose(found, mine, atol=1e-5), (
            "these are the gradients that a device itself has for its columns. Who else multiplied by these columns?"
        )
        assert not np.allclose(found, own_EVd / DEVICES, atol=1e-5), (
            "this is a mean over the devices. The loss is a sum over everybody's tokens: what does its gradient do?"
        )
        assert np.allclose(found, own_EVd, atol=1e-5), "the values are not those of the columns that this device holds"
        arriving, enough = _arriving(fn, dw_EVD[0]), ARRIVES["reduce_scatter"] * own_EVd[0].size * 4
        assert arriving <= enough, (
            f"right, but in a ring {arriving:.0f} bytes arrive at each device where {enough:.0f} are enough: it is "
            "told the sum of all columns, and most of it is thrown away"
        )
        return "A gather forward is a reduce-scatter backward: the same bytes, the other way."

    grade(3, body)


def check_target_logit(fn: Callable[..., Any]) -> None:
    """Exercise 4: the logit of each token's target, of which one device alone has the row."""
    x_ND = jax.random.normal(jax.random.key(3), (9, 3))
    head_EUD = jax.random.normal(jax.random.key(4), (DEVICES, 5, 3))
    targets_N = jnp.array([0, 19, 7, 12, 5, 4, 16, 9, 10])

    def body() -> str:
        found_EN = jnp.asarray(_on_devices(lambda head_UD, axis: fn(x_ND, head_UD, targets_N, axis), head_EUD))
        exact_N = jnp.sum(x_ND * jnp.concatenate(head_EUD)[targets_N], 1)
        assert found_EN.shape == (DEVICES, 9), f"one number per token, not {found_EN.shape[1:]}"
        held_EN = targets_N // 5 == jnp.arange(DEVICES)[:, None]
        only_own = jnp.where(held_EN, exact_N, 0)
        assert not np.allclose(found_EN, only_own, atol=1e-5), (
            "each device has the logits whose row it holds, and 0 for the others. They have not told each other yet"
        )
        assert np.allclose(found_EN, found_EN[0], atol=1e-5, equal_nan=True), "the devices end with different answers"
        first_N = held_EN[0]
        wrong_first = not np.allclose(found_EN[0][first_N], exact_N[first_N], atol=1e-5)
        assert not wrong_first, (
            "for targets in the rows of the first device your answer is wrong: what do the devices add that do not "
            "hold the row? An id that a device does not hold still reads some row"
        )
        assert np.allclose(found_EN[0], exact_N, atol=1e-5), (
            "targets of the first device's rows are right, others are not. In which row of its own does a device find "
            "an id of the whole vocabulary?"
        )
        arriving = _arriving(lambda head_UD, axis: fn(x_ND, head_UD, targets_N, axis), head_EUD[0])
        enough = ARRIVES["psum"] * 9 * 4
        assert arriving <= enough, (
            f"right, but in a ring {arriving:.0f} bytes arrive at each device, and one number per token, {enough:.0f} "
            "bytes, is enough"
        )
        return "One sum of [N]. The row of a target never leaves its device."

    grade(4, body)


def _on_devices(fn: Callable[..., Any], *parts: Any) -> Any:
    """`fn(*parts, axis)` on every device, each with its row of the parts; results `[devices, ..]`."""
    return jax.vmap(lambda *own: fn(*own, AXIS), axis_name=AXIS)(*parts)


def _arriving(fn: Callable[..., Any], *own: Any) -> float:
    """Bytes that arrive at a device in all collectives of its program, loops multiplied out."""
    program = jax.make_jaxpr(lambda *args: fn(*args, AXIS), axis_env=[(AXIS, DEVICES)])(*own)
    total = 0.0
    for eqn, times in equations(program.jaxpr):
        avals: list[Any] = [var.aval for var in eqn.outvars]
        factor = ARRIVES.get(eqn.primitive.name.removesuffix("_invariant"), 0)
        total += times * factor * sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total
