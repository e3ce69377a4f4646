"""Checks of notebook 08's exercises: what waits for the backward pass, a feed-forward by rows, a better plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.llama import PRESETS, LlamaConfig, Plan
from llamem.memory.jaxprs import equations
from llamem.planner import Estimate, estimate
from llamem.planner.candidates import words

GiB = 2**30
# Exercise 3: a plan that fits and wastes time, for this model, chip and length.
CHIP, TOKENS = "v5e-1", 65_536
GIVEN = Plan(attention_tiles=8, mlp_tiles=64, offload=("block_in",), moments="host")


def one_b() -> LlamaConfig:
    """Llama 3.2 1B in bfloat16."""
    return PRESETS["llama3.2-1b"].replace(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)


def check_waiting_bytes(fn: Callable[..., int]) -> None:
    """Exercise 1: bytes of the layers' inputs, scanned or nested, on the chip or away."""

    def body() -> str:
        for L, D, tokens, groups in (
            (16, 2048, 131_072, 1),
            (16, 2048, 131_072, 8),
            (28, 3072, 8192, 7),
            (12, 64, 10, 3),
        ):
            found, x = fn(L, D, tokens, groups), tokens * D * 2
            inputs = L if groups == 1 else groups + L // groups
            case = f"{L} layers, D={D}, {tokens:,} tokens, {groups} group{'s' * (groups > 1)}"
            assert found is not None and np.ndim(found) == 0, "return one number, in bytes"
            if found == inputs * x // 2:
                raise AssertionError(f"{case}: half of what waits. How many bytes has a number in bfloat16?")
            if groups > 1 and found == L * x:
                raise AssertionError(f"{case}: that is one input for each layer. What do groups keep instead?")
            if groups > 1 and found == groups * x:
                raise AssertionError(f"{case}: the groups' inputs. And inside the group that is at work?")
            assert found == inputs * x, f"{case}: {found} is not it. One input is tokens x D numbers."
        return "It grows with the tokens, and a chip's memory does not."

    grade(1, body)


def check_feed_forward(fn: Callable[..., Any]) -> None:
    """Exercise 2: a feed-forward by rows that never holds all of gate and up, and loses no bits."""
    N, D, F, tiles = 2048, 16, 64, 128
    keys = jax.random.split(jax.random.key(0), 5)
    w32 = {
        "gate": jax.random.normal(keys[0], (D, F)) / D**0.5,
        "up": jax.random.normal(keys[1], (D, F)) / D**0.5,
        "down": jax.random.normal(keys[2], (F, D)) / F**0.5,
    }
    x32, out32 = jax.random.normal(keys[3], (N, D)), jax.random.normal(keys[4], (N, D))
    w, x_ND, weight_ND = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w32, x32, out32))

    def body() -> str:
        exact = jax.tree.map(lambda a: np.asarray(a, np.float32), (w, x_ND))
        expected = _whole(*exact)
        found = fn(*exact, tiles)
        assert getattr(found, "shape", None) == (N, D), "return one row for every row of x, [N, D]"
        assert np.allclose(found, expected, atol=1e-4), "the result is not silu(x gate) * (x up) down, in f32"
        for tried in (tiles, 16):
            jaxpr = jax.make_jaxpr(jax.grad(lambda w, n=tried: jnp.sum(fn(w, x_ND, n) * weight_ND)))(w).jaxpr
            made: list[Any] = [v.aval for e, _ in equations(jaxpr) for v in e.outvars]
            largest = max((int(np.prod(a.shape)) for a in made if F in a.shape), default=0)
            if largest >= N * F:
                raise AssertionError(
                    f"with {tried} tiles some array still holds {N} x {F} numbers. In the forward pass, or kept "
                    "from it for the backward pass? Which function says that a tile is to be computed again?"
                )
        whole, by_rows = (
            jax.grad(lambda w, f=f: jnp.sum(f(w, x_ND).astype(jnp.float32) * weight_ND))(w)
            for f in (_whole, lambda w, x: fn(w, x, tiles))
        )
        true = jax.grad(lambda w: jnp.sum(_whole(w, exact[1]) * np.asarray(weight_ND, np.float32)))(exact[0])
        for name in w:
            assert by_rows[name].dtype == jnp.bfloat16, f"the gradient of {name} has another type than the weight"
            error, limit = (_error(one[name], true[name]) for one in (by_rows, whole))
            if error > 1.3 * limit:
                raise AssertionError(
                    f"the gradient of {name} is off by {error:.1e}, that of the whole feed-forward by {limit:.1e}: "
                    f"{tiles} tiles are added up, each sum rounded to eight bits. In which type is the sum?"
                )
        return "One tile of gate and up at a time, and no bit lost in the sum."

    grade(2, body)


def _whole(w: Any, x_ND: Any) -> Any:
    return (jax.nn.silu(x_ND @ w["gate"]) * (x_ND @ w["up"])) @ w["down"]


def _error(found: Any, true: Any) -> float:
    found = np.asarray(found, np.float32)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def given_estimate() -> Estimate:
    """What the plan of exercise 3 is estimated to need."""
    return estimate(one_b(), GIVEN, CHIP, seq_len=TOKENS)


def check_better_plan(fn: Callable[[], Plan]) -> None:
    """Exercise 3: a plan that fits the same chip and takes at least a tenth less time, by estimate."""

    def body() -> str:
        plan = fn()
        assert isinstance(plan, Plan), f"return a llamem.Plan, not {type(plan).__name__}"
        given, found = given_estimate(), estimate(one_b(), plan, CHIP, seq_len=TOKENS)
        assert plan != GIVEN, "that is the plan that you were given. What in it is not needed at this length?"
        if not found.fits:
            largest = max(
                (line for line in found.lines if line.name not in ("weights", "moments")), key=lambda x: x.bytes
            )
            raise AssertionError(
                f"{words(plan)} needs {found.peak_bytes / GiB:.2f} of {(found.capacity_bytes or 0) / GiB:.2f} GiB. The "
                f"largest line beside weights and moments is {largest.name!r}. Which tool makes that one smaller?"
            )
        if found.seconds.total > 0.9 * given.seconds.total:
            raise AssertionError(
                f"it fits, in {found.seconds.total:.2f} s against {given.seconds.total:.2f} s: compare the parts of "
                "both, str(llamem.estimate(...)). Which part is still there because of a tool that you can spare?"
            )
        saved = 1 - found.seconds.total / given.seconds.total
        return (
            f"{found.peak_bytes / GiB:.2f} GiB and {saved:.0%} less time, by estimate: what is not needed is not free."
        )

    grade(3, body)
