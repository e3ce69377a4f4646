"""Checks of notebook 08's exercises: a better plan, two lines of a plan's ledger, a feed-forward by rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from llamem.llama import PRESETS, LlamaConfig, Plan
from llamem.planner import Estimate, estimate
from llamem.planner.estimates import feed_forward, residuals
from llamem.planner.sizes import Sizes
from llamem_course.exercises import grade

GiB = 2**30
# Exercise 1: a plan that fits and wastes time, for this model, chip and length.
CHIP, TOKENS = "v5e-1", 65_536
GIVEN = Plan(head_groups=8, mlp_tiles=64, offload=("block_in",), moments="host")


def one_b() -> LlamaConfig:
    """Llama 3.2 1B in bfloat16."""
    return _in_bf16("llama3.2-1b")


def check_ledger_lines(fn: Callable[..., Any]) -> None:
    """Exercise 2: the residuals and the feed-forward of a plan, as `llamem.estimate` has them."""
    wide = one_b().replace(compute_dtype=jnp.float32, param_dtype=jnp.float32)
    away, rows = Plan(offload=("block_in",)), Plan(mlp_tiles=16)

    def body() -> str:
        if "estimate" in getattr(getattr(fn, "__code__", None), "co_names", ()):
            raise AssertionError("write the lines down yourself: the check asks llamem.estimate, and compares")
        for config, tokens, plan in (
            (one_b(), 131_072, Plan()),
            (one_b(), 131_072, away),
            (one_b(), 131_072, rows),
            (one_b(), 32_768, Plan(offload=("attn_out",))),  # another name than the layers' inputs
            (one_b(), 32_768, Plan(offload=("attn_out", "block_in"))),
            (one_b().replace(param_dtype=jnp.float32), 8192, rows),  # stored in another type than it computes in
            (_in_bf16("llama3.1-8b"), 8192, rows.replace(mlp_tiles=4)),
            (_in_bf16("llama3.2-3b"), 65_536, away.replace(mlp_tiles=128)),
            (wide, 4096, rows.replace(mlp_tiles=2)),
        ):
            found = fn(config, tokens, plan)
            if not isinstance(found, dict) or set(found) != {"residuals", "feed-forward"}:
                raise AssertionError("return a dictionary of two numbers of bytes, 'residuals' and 'feed-forward'")
            sizes = Sizes(estimate(config, plan, CHIP, seq_len=tokens).question, plan)
            for line in (residuals(sizes), feed_forward(sizes)):
                if found[line.name] != line.bytes:
                    questions = _residuals if line.name == "residuals" else _feed_forward
                    hint = questions(config, tokens, plan, line.bytes).get(found[line.name])
                    raise AssertionError(
                        f"{config.n_layers} layers, D={config.d_model}, F={config.d_ff}, in {config.compute_dtype}, "
                        f"{tokens:,} tokens, {plan}, {line.name}: yours is {found[line.name] / GiB:.3f} GiB, "
                        f"the estimate's {line.bytes / GiB:.3f}. {hint or 'What is there at this moment?'}"
                    )
        return "Two tools, two lines: you know what each buys before anything is compiled."

    grade(2, body)


def _in_bf16(name: str) -> LlamaConfig:
    return PRESETS[name].replace(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)


def _residuals(config: LlamaConfig, tokens: int, plan: Plan, right: int) -> dict[float, str]:
    """By wrong numbers of bytes: what to ask."""
    one = tokens * config.d_model * config.compute_dtype.itemsize
    if not right:
        return {
            one: "The line counts inputs that the chip keeps, not the one in transit.",
            config.n_layers * one: "Where do the inputs wait?",
        }
    asked = {one: "How many layers leave their input behind?", right / GiB: "The line is in bytes, not in GiB."}
    asked |= {
        0: "Names wait on the host: is the layers' input among them?" if plan.offload else "Nothing is offloaded."
    }
    of_type = "How many bytes has a number in the type that the layers compute in?"
    asked |= dict.fromkeys((2 * right, right / 2, config.n_layers * tokens * config.d_model), of_type)
    return asked if config.n_layers == 16 else asked | {16 * one: "How many layers has this model?"}


def _feed_forward(config: LlamaConfig, tokens: int, plan: Plan, right: int) -> dict[float, str]:
    """By wrong numbers of bytes: what to ask."""
    size, tiles, F = config.compute_dtype.itemsize, plan.mlp_tiles, config.d_ff
    matrices, whole = 3 * config.d_model * F, 3 * tokens * F * size
    sums, tile = 4 * matrices, whole // tiles
    asked = dict.fromkeys((2 * right, right / 2), "How many bytes has each of these numbers?")
    asked |= {
        config.n_layers * right: "How many layers are at work at one moment?",
        2 * tile // 3 + (sums if tiles > 1 else 0): "Gate and up are two arrays. The ledger's line has a third.",
    }
    if tiles == 1:
        return asked | {tile + sums: "With all rows in one tile, what is there to add up?"}
    together = "Of how many rows do gate and up exist together?"
    narrow = "Sums over many tiles lose bits in bfloat16. In which type are these?"
    return asked | {
        whole: together,
        whole + sums: together,
        tile: "The tiles share the weights. So what is added up from tile to tile?",
        tile + sums // 3: "How many matrices has a feed-forward?",
        tile + 2 * sums // 3: "How many matrices has a feed-forward?",
        tile + sums // tiles: "Does a sum over all tiles grow smaller with the tile?",
        tile + size * matrices: narrow,
    }


def check_feed_forward(fn: Callable[..., Any]) -> None:
    """Exercise 3: a feed-forward by rows that never holds all of gate and up, and loses no bits."""
    N, D, F, tiles = 2048, 12, 96, 128
    keys = jax.random.split(jax.random.key(0), 5)
    w32 = {
        "gate": jax.random.normal(keys[0], (D, F)) / D**0.5,
        "up": jax.random.normal(keys[1], (D, F)) / D**0.5,
        "down": jax.random.normal(keys[2], (F, D)) / F**0.5,
    }
    x32, out32 = jax.random.normal(keys[3], (N, D)), jax.random.normal(keys[4], (N, D))
    w, x_ND, weight_ND = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w32, x32, out32))

    def body() -> str:
        exact = jax.tree.map(lambda a: a.astype(jnp.float32), (w, x_ND))
        expected = _whole(*exact)
        found = fn(*exact, tiles)
        assert getattr(found, "shape", None) == (N, D), "return one row for every row of x, [N, D]"
        assert np.allclose(found, expected, atol=1e-4), "the result is not silu(x gate) * (x up) down, in f32"
        lengths, turns, pairs = set(), {}, []
        for tried in (tiles, 16):
            slope = jax.grad(lambda w, x, n=tried: jnp.sum(fn(w, x, n) * weight_ND), (0, 1))
            jaxpr = jax.make_jaxpr(slope)(w, x_ND).jaxpr
            found = list(equations(jaxpr))
            lengths.add(len(found))
            made: list[Any] = [v.aval for e, _ in found for v in e.outvars]
            products: list[Any] = [e for e, _ in found if e.primitive.name == "dot_general"]
            pairs += [{v.aval.dtype for v in product.invars} for product in products]
            if max(int(np.prod(a.shape)) for a in made) >= N * F:
                raise AssertionError(
                    f"with {tried} tiles some array still holds {N} x {F} numbers, or more. In the forward pass, or "
                    "kept from it for the backward pass? Which function says that a tile is to be computed again?"
                )
            if any(e.primitive.name == "scan" and e.params["unroll"] > 1 for e, _ in found):
                raise AssertionError("the loop is unrolled: a compiler may hold several tiles, or all, at once")
            largest = max((int(np.prod(a.shape)) for a in made if F in a.shape), default=0)
            if largest // F != N // tried:
                raise AssertionError(
                    f"with {tried} tiles the largest array of {F} columns has {largest // F} rows. How many rows of "
                    f"{N} has one of {tried} tiles?"
                )
            tile = {N // tried, F}
            turns[tried] = {n for e, n in found for v in e.outvars if tile <= {*getattr(v.aval, "shape", ())}}
        if len(lengths) > 1:
            raise AssertionError(
                f"the program has {min(lengths)} operations with one number of tiles and {max(lengths)} with another: "
                "the loop is written out, and a compiler may hold several tiles. Which function of JAX repeats one?"
            )
        for tried, found in turns.items():
            if found - {tried}:
                raise AssertionError(
                    f"a loop over {tried} tiles turns {min(found)} times. Is more than one tile of gate and up made "
                    "in a turn, and how many exist together then?"
                )
        out = jax.eval_shape(lambda w, x: fn(w, x, tiles), w, x_ND)
        assert out.dtype == x_ND.dtype, (
            f"the result is {out.dtype}, and x is {x_ND.dtype}: the next layer wants x's type"
        )
        if {jnp.dtype(jnp.float32)} in pairs:
            raise AssertionError(
                "some product reads float32 on both sides, twice the bytes of x's type. Of which type should weights "
                "and rows be inside of a tile, if only the sum over tiles has to be float32?"
            )
        weight32_ND = np.asarray(weight_ND, np.float32)

        def slopes(f: Callable[..., Any], of: Any) -> dict[str, Any]:
            loss = lambda w, x: jnp.sum(f(w, x).astype(jnp.float32) * weight32_ND)  # noqa: E731
            of_w, of_x = jax.grad(loss, (0, 1))(*of)
            return of_w | {"x": of_x}

        by_rows, whole = (slopes(f, (w, x_ND)) for f in (lambda w, x: fn(w, x, tiles), _whole))
        true = slopes(_whole, exact)
        for name, slope in by_rows.items():
            assert slope.dtype == jnp.bfloat16, f"the gradient of {name} has another type than {name}"
            if not np.any(slope):
                raise AssertionError(f"there is no gradient of {name}: what would be learnt from it, or below it?")
            error, limit = (_error(one[name], true[name]) for one in (by_rows, whole))
            if error > 1.3 * limit:
                raise AssertionError(
                    f"the gradient of {name} is off by {error:.1e}, that of the whole feed-forward by {limit:.1e}: "
                    f"{tiles} tiles are added up, each sum rounded to eight bits. In which type is the sum?"
                )
        return "One tile of gate and up at a time, and no bit lost in the sum."

    grade(3, body)


def _whole(w: Any, x_ND: Any) -> Any:
    return (jax.nn.silu(x_ND @ w["gate"]) * (x_ND @ w["up"])) @ w["down"]


def _error(found: Any, true: Any) -> float:
    found = np.asarray(found, np.float32)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def given_estimate() -> Estimate:
    """Return what the plan of exercise 1 is estimated to need."""
    return estimate(one_b(), GIVEN, CHIP, seq_len=TOKENS)


def check_better_plan(fn: Callable[[], Plan]) -> None:
    """Exercise 1: a plan that fits the same chip and takes at least a seventh less time, by estimate."""

    def body() -> str:
        plan = fn()
        assert isinstance(plan, Plan), f"return a llamem.Plan, not {type(plan).__name__}"
        given, found = given_estimate(), estimate(one_b(), plan, CHIP, seq_len=TOKENS)
        assert plan != GIVEN, "that is the plan that you were given. What in it is not needed at this length?"
        if not found.fits:
            largest = max((line for line in found.lines if line.name != "weights"), key=lambda x: x.bytes)
            raise AssertionError(
                f"{plan} needs {found.peak_bytes / GiB:.2f} of {(found.capacity_bytes or 0) / GiB:.2f} GiB. The "
                f"largest line beside weights is {largest.name!r}. Which tool makes that one smaller?"
            )
        allowed = 1.01 * 6 / 7 * given.seconds.total  # an estimate is not known to a hundredth
        if found.seconds.total > allowed:
            raise AssertionError(
                f"it fits, in {found.seconds.total:.2f} s. {allowed:.2f} s are allowed, about a "
                f"seventh less than the {given.seconds.total:.2f} s of the given plan. Compare the parts of both, "
                "str(llamem.estimate(...)). Which part is still there because of a tool that you can spare?"
            )
        saved = 1 - found.seconds.total / given.seconds.total
        return (
            f"{found.peak_bytes / GiB:.2f} GiB and {saved:.0%} less time, by estimate: what is not needed is not free."
        )

    grade(1, body)
