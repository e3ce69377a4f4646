"""The losses and tiles on eight CPU devices: each way to divide them, against one device in float64."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from loss_reference import reference  # noqa: E402

import jaxmem  # noqa: E402
import llamem  # noqa: E402
from jaxmem.compiling import matmul_flops  # noqa: E402
from jaxmem.reading.hlo import compiled_matmul_flops, optimised_text, parse  # noqa: E402

N, D, V = 40, 6, 52  # no tile size divides what a device holds of them: 10 tokens, 26 rows of the head
RNG = np.random.default_rng(5)
HIDDEN, HEAD = RNG.normal(size=(N, D)), RNG.normal(size=(V, D))
TARGETS, COTANGENT = RNG.integers(0, V, N), RNG.normal(size=N)
TARGETS[[1, 30]] = -100
OPTIONS: dict[str, Any] = {"z_loss": 0.01, "logit_softcap": 5.0}
LOSS, GRADIENTS = reference(HIDDEN, HEAD, TARGETS, COTANGENT, **OPTIONS)
X, W, IDS, C = (jnp.asarray(a, t) for a, t in ((HIDDEN, "f4"), (HEAD, "f4"), (TARGETS, "i4"), (COTANGENT, "f4")))


def agrees(fn: Any, *arguments: Any) -> None:
    """Value and gradients of `sum(cotangent * loss)`."""
    value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*arguments)
    np.testing.assert_allclose(value, COTANGENT @ LOSS, rtol=1e-5)
    for actual, expected in zip(grads, GRADIENTS, strict=False):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def weighted(axis: Any, num_tiles: int, reduction: str, hidden: Any, head: Any, targets: Any, weights: Any) -> Any:
    loss = partial(llamem.tiled_cross_entropy, axis=axis, num_tiles=num_tiles, **OPTIONS)
    if reduction == "sum":
        return loss(hidden, head, targets, weights=weights, reduction="sum")
    return jnp.sum(weights * loss(hidden, head, targets, reduction="none"))


def inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data")
    shard_map = partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=check_vma)
    for axis, num_tiles, reduction in (("tokens", 1, "sum"), ("tokens", 3, "sum"), ("vocab", 3, "none")):
        loss = partial(weighted, axis, num_tiles, reduction)

        @partial(shard_map, in_specs=(rows, P(), rows, rows))
        def of_part(hidden, head, targets, weights, loss=loss):
            return jax.lax.psum(loss(hidden, head, targets, weights), "data")

        agrees(of_part, X, W, IDS, C)

    def squares(params, xs):
        return llamem.tiled_sum(lambda p, x: jnp.sum(jnp.sin(x @ p) ** 2), params, xs, 3)

    def mapped(params, xs):
        return jnp.sum(llamem.tiled_map(lambda p, x: jnp.sin(x @ p), params, xs, 3) ** 2)

    def log_probabilities(params, xs):
        return jnp.sum(llamem.tiled_logprobs(xs, params.T, jnp.argmax(xs, -1), num_tiles=3) ** 2)

    params = jnp.cos(jnp.arange(D * 30.0).reshape(D, 30))
    for fn in (squares, mapped, log_probabilities):
        divided = shard_map(lambda p, x, fn=fn: jax.lax.psum(fn(p, x), "data"), in_specs=(P(), rows))
        found, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(params, X) for f in (divided, fn))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def vocabulary_over_devices(check_vma: bool) -> None:
    """Each device holds half of the head; JAX takes gradients outside `shard_map` or, unchecked, inside."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = P("data"), P("tensor"), P("data"), P("data")

    def part(hidden, head, targets, weights):
        kwargs: dict[str, Any] = OPTIONS | {"num_tiles": 2, "reduction": "none"}
        return jnp.sum(weights * llamem.tiled_cross_entropy(hidden, head, targets, vocab_axis_name="tensor", **kwargs))

    for wanted in ((0, 1), (0,)):
        if check_vma:
            whole = jax.shard_map(lambda *a: jax.lax.psum(part(*a), "data"), mesh=mesh, in_specs=specs, out_specs=P())
            grads = jax.jit(jax.grad(whole, argnums=wanted))(X, W, IDS, C)
        else:

            def own(*arguments, wanted=wanted):
                dx, *dw = jax.grad(part, argnums=wanted)(*arguments)
                return dx, *(jax.lax.psum(d, "data") for d in dw)

            out = specs[: len(wanted)]
            whole = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            compiled = jax.jit(whole).lower(X, W, IDS, C).compile()
            for computation in str(compiled.as_text()).split("\n\n"):
                assert "all-reduce(" not in computation or computation.startswith("ENTRY"), "devices meet in a loop"
            grads = compiled(X, W, IDS, C)
        for actual, expected in zip(grads, GRADIENTS, strict=False):
            np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
    options: dict[str, Any] = OPTIONS | {"reduction": "none", "num_tiles": 2}
    rows = partial(llamem.tiled_cross_entropy, vocab_axis_name="tensor", **options)
    divided = jax.shard_map(rows, mesh=mesh, in_specs=specs[:3], out_specs=P("data"), check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(divided)(X, W, IDS), LOSS, rtol=1e-5, atol=1e-5)


def policy_gradients(check_vma: bool) -> None:
    """REINFORCE is cross-entropy weighted by advantages: data parallel, the count of all tokens given, also in bf16."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows, count = P("data"), float((TARGETS >= 0).sum())
    loss, gradients = reference(HIDDEN, HEAD, TARGETS, COTANGENT / count)

    for axis, dtype, off in (("tokens", jnp.float32, 1e-5), ("vocab", jnp.float32, 1e-5), ("auto", jnp.bfloat16, 2e-2)):

        @partial(jax.shard_map, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=P(), check_vma=check_vma)
        def of_part(hidden, head, targets, advantages, axis=axis):
            options: dict[str, Any] = {
                "objective": llamem.PolicyObjective("reinforce"),
                "normalizer": count,
                "axis": axis,
            }
            options |= {} if axis == "auto" else {"num_tiles": 3}
            return jax.lax.psum(llamem.tiled_policy_loss(hidden, head, targets, advantages, **options), "data")

        found = jax.jit(jax.value_and_grad(of_part, argnums=(0, 1)))(X.astype(dtype), W.astype(dtype), IDS, C)
        np.testing.assert_allclose(found[0], COTANGENT @ loss / count, rtol=off, atol=off)
        for actual, expected in zip(found[1], gradients, strict=False):
            np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=off * np.abs(expected).max())


def on_explicit_axes() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))

    for hidden, head in (("data", None), (None, None)), ((None, None), ("tensor", None)), (("data", "tensor"), (None,)):
        batch = put(IDS, hidden[0]), put(C, hidden[0])
        for axis, reduction in (("tokens", "sum"), ("vocab", "none")):
            agrees(partial(weighted, axis, 3, reduction), put(X, *hidden), put(W, *head), *batch)
    rows = llamem.tiled_cross_entropy(put(X, "data"), W, put(IDS, "data"), reduction="none", **OPTIONS)
    np.testing.assert_allclose(rows, LOSS, rtol=1e-4, atol=1e-5)
    assert jax.typeof(rows).sharding.spec == P("data")
    summed = jax.jit(jax.grad(lambda p, x: llamem.tiled_sum(lambda p, x: jnp.sum(jnp.sin(x @ p)), p, x, 3)))
    np.testing.assert_allclose(summed(put(W.T, None, "tensor"), put(X, "data")), summed(W.T, X), rtol=1e-4, atol=1e-4)
    for axes in (("data",), (None, "tensor")):
        mapped = llamem.tiled_map(lambda _, x: jnp.sin(x), (), put(X, *axes), 3)
        np.testing.assert_allclose(mapped, jnp.sin(X), rtol=1e-6)
        assert jax.typeof(mapped).sharding == jax.typeof(put(X, *axes)).sharding
    of_map = jax.jit(jax.grad(lambda p, x: jnp.sum(llamem.tiled_map(lambda p, x: jnp.sin(x @ p), p, x, 3) ** 2)))
    np.testing.assert_allclose(of_map(put(W.T), put(X, "data")), of_map(W.T, X), rtol=1e-4, atol=1e-4)
    given = put(IDS, "data"), put(C, "data")
    policy: Any = partial(llamem.tiled_policy_loss, objective=llamem.PolicyObjective("reinforce"), num_tiles=3)
    np.testing.assert_allclose(policy(put(X, "data"), W, *given), policy(X, W, IDS, C), rtol=1e-5)


LAYOUTS: list[tuple[dict[str, int], P, P, tuple[int, ...]]] = [  # a mesh, tokens and head on it, shape of tokens
    ({"data": 8}, P("data"), P(), (8, 23)),
    ({"data": 8}, P("data"), P(), (184,)),
    ({"context": 8}, P(None, "context"), P(), (2, 96)),
    ({"data": 2, "context": 4}, P("data", "context"), P(), (4, 48)),
    ({"fsdp": 8}, P("fsdp"), P(None, "fsdp"), (8, 23)),
    ({"tensor": 8}, P(), P("tensor"), (5, 40)),
    ({"fsdp": 4, "tensor": 2}, P("fsdp"), P("tensor", "fsdp"), (4, 48)),
    ({"fsdp": 4, "tensor": 2}, P("fsdp"), P("tensor", "fsdp"), (60,)),
]


def under_jit_alone() -> None:
    """Whatever a mesh divides, each device does its share of the work, and values are those of one device."""
    width, vocab = 16, 72
    head = jnp.asarray(RNG.normal(size=(vocab, width)), jnp.float32)
    ways: dict[str, Any] = {
        f"{axis} {reduction}": partial(weighted, axis, 3, reduction)
        for axis, reduction in (("tokens", "sum"), ("vocab", "sum"), ("vocab", "none"))
    }
    ways["token loss"] = lambda x, head, ids, c: llamem.tiled_token_loss(
        lambda logprob, entropy, c: c * jnp.tanh(logprob) + 0.1 * entropy, x, head, ids, c, num_tiles=3
    )
    ways["sum"] = lambda x, head, *_: llamem.tiled_sum(lambda w, x: jnp.sum(jnp.sin(x @ w.T) ** 2), head, x, 3)
    ways["map"] = lambda x, head, *_: jnp.sum(llamem.tiled_map(lambda w, x: jnp.sin(x @ w.T), head, x, 3) ** 2)
    for axes, tokens, rows, shape in LAYOUTS:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        x = jnp.asarray(RNG.normal(size=(*shape, width)), jnp.float32)
        ids, c = jnp.asarray(RNG.integers(0, vocab, shape)), jnp.asarray(RNG.normal(size=shape), jnp.float32)
        specs = tokens, rows, tokens, tokens
        arrays = x, head, ids, c
        divided = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
        for name, way in ways.items():
            if name in ("sum", "map") and (tokens == P() or "fsdp" in axes or len(tokens) > 1):
                continue  # they tile the leading axis alone, and leave parameters where they lie
            step = jax.value_and_grad(way, argnums=(0, 1))
            compiled = jax.jit(step).lower(*divided).compile()
            found, expected = compiled(*divided), step(*arrays)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
            work = compiled_matmul_flops(parse(optimised_text(compiled))) or 0
            share = work * 8 / matmul_flops(jax.make_jaxpr(step)(*arrays).jaxpr)
            assert 0.5 < share < 1.5, f"{name} over {axes}, {shape}: each device does {share:.1f} times its share"
    # The head's columns travel, not the logits of every tile.
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    places = [NamedSharding(mesh, spec) for spec in (P("fsdp"), P(None, "fsdp"), P("fsdp"))]
    shapes = ((4096, 64), jnp.bfloat16), ((256, 64), jnp.bfloat16), ((4096,), jnp.int32)
    structs = [jax.ShapeDtypeStruct(*of, sharding=place) for of, place in zip(shapes, places, strict=True)]
    loss = partial(llamem.tiled_cross_entropy, axis="tokens", num_tiles=16)
    report = jaxmem.compile_report(jax.grad(loss, argnums=(0, 1)), *structs)
    assert sum(row.arriving or 0 for row in report.collectives) < 4 * 4096 * 256


if __name__ == "__main__":
    under_jit_alone()
    for checked in (True, False):
        inside_shard_map(checked)
        vocabulary_over_devices(checked)
        policy_gradients(checked)
    on_explicit_axes()
