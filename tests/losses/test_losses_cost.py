"""What the tiled losses cost (products, memory), what may be done to them, what they refuse."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import available, compile_report, matmul_flops
from llamem.losses import tile_choice
from llamem.losses.cross_entropy import tiled_cross_entropy
from llamem.losses.tile_choice import choose_tiles

N, D, V = 53, 16, 300
KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN, HEAD = jax.random.normal(KEYS[0], (N, D)), jax.random.normal(KEYS[1], (V, D))
TARGETS = jax.random.randint(KEYS[2], (N,), 0, V).at[5].set(-100)
LLAMA_8B = [
    jax.ShapeDtypeStruct(*s) for s in (((8192, 4096), "bfloat16"), ((128_256, 4096), "bfloat16"), ((8192,), "int32"))
]
BOTH_AXES = pytest.mark.parametrize("axis", ["tokens", "vocab"])


def product_flops(fn, *args) -> int:
    return matmul_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def loss_of(reduction: Any = "mean", **kwargs: Any):
    def fn(hidden, head):
        kwargs.setdefault("num_tiles", 3)
        return jnp.sum(jnp.tanh(tiled_cross_entropy(hidden, head, TARGETS, reduction=reduction, **kwargs) / 10))

    return fn


CASES: list[tuple[Any, Any]] = [("tokens", "mean"), ("vocab", "mean"), ("vocab", "none")]


@pytest.mark.quick
@pytest.mark.parametrize(("axis", "reduction"), CASES)
def test_matrix_products(axis, reduction):
    fn, unit = loss_of(reduction, axis=axis, num_tiles=53 if axis == "tokens" else 3), 2 * N * D * V
    assert product_flops(fn, HIDDEN, HEAD) == unit
    assert product_flops(jax.grad(fn), HIDDEN, HEAD) == 2 * unit
    both = product_flops(jax.grad(fn, argnums=(0, 1)), HIDDEN, HEAD)
    assert both == (3 if axis == "tokens" else 4) * unit
    assert (
        product_flops(jax.grad(lambda x, w: fn(x, jax.lax.stop_gradient(w)), argnums=(0, 1)), HIDDEN, HEAD) == 2 * unit
    )


def compiled(fn, tokens=512, d_model=32, vocab=32_000) -> Any:
    hidden, head = jax.ShapeDtypeStruct((tokens, d_model), "float32"), jax.ShapeDtypeStruct((vocab, d_model), "float32")
    targets = jax.ShapeDtypeStruct((tokens,), "int32")
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1))).lower(hidden, head, targets).compile()


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
@pytest.mark.parametrize("chip", ["v6e-1", pytest.param("v5p-1", marks=pytest.mark.weekly), "a100-40"])
def test_the_compilers_leave_these_products_and_no_other(chip):
    """Llama 3 8B's head in 32 tiles, the vocabulary's with a remainder: 2, 4, 6 and 8 NDV to the last FLOP."""
    if not available(chip):
        pytest.skip(f"no compiler for {chip} here")

    def flops(axis, argnums) -> int | None:
        fn: Any = partial(tiled_cross_entropy, axis=axis, num_tiles=32)
        if argnums is not None:
            fn = jax.value_and_grad(fn, argnums=argnums)
        return compile_report(fn, *LLAMA_8B, chip=chip).compiled_matmul_flops

    unit = 8192 * 4096 * 128_256
    for axis in ("tokens", "vocab"):
        assert flops(axis, None) == 2 * unit
        assert flops(axis, 0) == 4 * unit
    assert flops("tokens", (0, 1)) == 6 * unit
    assert flops("vocab", (0, 1)) == 8 * unit


def test_memory_is_that_of_a_tile():
    def plain(x, w, y):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ w.T, y))

    def temporaries(fn):
        return compiled(fn).memory_analysis().temp_size_in_bytes

    logits = 512 * 32_000 * 4
    assert temporaries(plain) >= logits
    axes: tuple[Any, ...] = ("tokens", "vocab")
    for axis in axes:
        tiled = partial(tiled_cross_entropy, num_tiles=16, axis=axis)
        assert temporaries(tiled) < logits / 4
        assert f"[512,{32_000}]" not in compiled(tiled).as_text()


@pytest.mark.parametrize(("axis", "reduction"), [("tokens", "mean"), ("vocab", "none")])
def test_transformations(axis, reduction):
    counts = TARGETS >= 0

    def plain(x, w):
        rows = optax.softmax_cross_entropy_with_integer_labels(x @ w.T, jnp.maximum(TARGETS, 0)) * counts
        return jnp.sum(jnp.tanh((rows if reduction == "none" else rows.sum() / counts.sum()) / 10))

    fn = loss_of(reduction, axis=axis)
    many = jnp.stack([HIDDEN, HIDDEN / 2])
    expected = jax.vmap(jax.grad(plain, argnums=(0, 1)), (0, None))(many, HEAD)

    def close(a, b):
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-4, atol=2e-5), a, b)

    close(jax.vmap(jax.grad(fn, argnums=(0, 1)), (0, None))(many, HEAD), expected)
    close(jax.vmap(jax.grad(jax.checkpoint(fn), argnums=(0, 1)), (0, None))(many, HEAD), expected)
    scanned = jax.lax.scan(lambda c, x: (c, jax.grad(fn, argnums=(0, 1))(x, HEAD)), None, many)[1]
    close(scanned, expected)
    # Forward over reverse, as jax.hessian and Hessian-vector products do it.
    way = jnp.cos(HEAD)

    def product(f):
        return jax.jvp(jax.grad(f, argnums=(0, 1)), (HIDDEN, HEAD), (HIDDEN, way))[1]

    close(product(fn), product(plain))
    # Forward mode alone has no rule; JAX says so, the docstring says what to do.
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fn, (HIDDEN, HEAD), (HIDDEN, way))


def test_the_choice_follows_the_roofline():
    shape = (8192, 4096, 128_256)
    roomy, tight = choose_tiles(*shape, chip="v6e-1", memory_budget=4 << 30), choose_tiles(*shape, chip="v6e-1")
    assert (roomy.axis, roomy.products) == ("tokens", 3) and (tight.axis, tight.products) == ("vocab", 4)
    # The float32 accumulator of the head's gradient alone passes the tight budget.
    assert roomy.workspace_bytes > 4 * 128_256 * 4096 > tight.workspace_bytes > 4 * 8192 * 4096
    assert choose_tiles(*shape, chip="v6e-1", head="frozen").products == 2
    # A chip with more FLOPs per byte needs larger tiles of the vocabulary, so fewer.
    counts = [choose_tiles(*shape, chip=t, axis="vocab").num_tiles for t in ("v6e-1", "h100", "v5e-1", "a100-80")]
    assert counts == sorted(counts)
    assert "too large" in tight.reason and "taken" in tight.reason
    assert choose_tiles(8, 16, 32).num_tiles == choose_tiles(0, 16, 32).num_tiles == 1
    starved = choose_tiles(131_072, 4096, 128_256, chip="v5e-1", memory_budget=1)
    assert "nothing fits it" in starved.reason and starved.num_tiles > 1


def test_the_choice_knows_its_memory_on_a_cpu():
    shape = {"tokens": 2048, "d_model": 256, "vocab": 32_000}
    found = choose_tiles(**shape, dtype=jnp.float32, chip="cpu", axis="tokens")
    measured = compiled(tiled_cross_entropy, **shape).memory_analysis().temp_size_in_bytes
    assert found.num_tiles == 4 and 0.5 * found.workspace_bytes < measured < 1.15 * found.workspace_bytes


@pytest.mark.quick
def test_auto_never_has_all_logits_at_once_nor_more_for_more_tiles():
    """For odd counts of tokens, as `[:, :-1]` leaves them: 4 x 1,023 tokens and GPT-2's vocabulary."""

    def temporaries(**options):
        return compiled(partial(tiled_cross_entropy, **options), 4092, 16, 50_257)

    falling = [temporaries(axis="tokens", num_tiles=n).memory_analysis().temp_size_in_bytes for n in (1, 2, 4, 8)]
    assert falling == sorted(falling, reverse=True) and falling[-1] < falling[0] / 4
    auto = temporaries()
    assert "[4092,50257]" not in auto.as_text() and "[50257,4092]" not in auto.as_text()
    for chip in ("cpu", "t4", "v5e-1", "h100"):
        for tokens in (513, 2048, 4092, 8191):
            for axis in ("tokens", "vocab"):
                assert choose_tiles(tokens, 768, 50_257, chip=chip, axis=axis).num_tiles > 1


@pytest.mark.quick
def test_auto_is_told_whether_the_head_is_trained():
    """Trained, frozen, or frozen with adapters beside it: the program is that of the tiles chosen for it."""
    shape = tokens, d_model, vocab = 2048, 32, 32_000
    hidden, targets = jnp.zeros((tokens, d_model)), jnp.zeros(tokens, int)
    whole = jnp.zeros((vocab, d_model))
    beside = whole[:, :24], whole[:, 24:]
    trained, frozen = choose_tiles(*shape, dtype="float32"), choose_tiles(*shape, dtype="float32", head="frozen")
    assert trained.num_tiles != frozen.num_tiles and frozen.axis == "vocab"
    adapted = choose_tiles(*shape, dtype="float32", head="frozen", axis="tokens")

    def program(head, **options: Any) -> str:
        loss = partial(tiled_cross_entropy, **options)
        return str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head, targets))

    for head, is_trained, chosen in (
        (whole, True, trained),
        (beside, True, trained),
        (whole, False, frozen),
        (beside, False, adapted),
    ):
        given = program(head, axis=chosen.axis, num_tiles=chosen.num_tiles)
        assert program(head, head_trained=is_trained) == given


def test_an_unknown_card_is_judged_by_its_own_memory(monkeypatch):
    card = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 24 << 30})
    monkeypatch.setattr(tile_choice, "compiling_for", lambda: "NVIDIA RTX 5000 Ada Generation")
    monkeypatch.setattr(tile_choice.jax, "local_devices", lambda: [card])
    found, h100 = choose_tiles(8192, 4096, 128_256), choose_tiles(8192, 4096, 128_256, chip="h100")
    budget = int(re.findall(r"budget (\d+) MiB", found.reason)[0])
    assert 0.9 * 1536 < budget <= 1536 and "5000 Ada" in found.reason
    assert found.workspace_bytes < 1536 << 20 < h100.workspace_bytes


def test_an_unknown_name_is_refused(as_a_user):
    with pytest.raises(ValueError, match="'abacus' is no chip this knows"):
        choose_tiles(8, 8, 8, chip="abacus")


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_peaks_compiled_for_a_v6e():
    """Llama 3 8B's head, 8,192 tokens, bfloat16: operands and gradients alone are 2.082 GiB, plain logits 7.95."""
    gib = 2**30
    for chosen in (partial(tiled_cross_entropy, axis="vocab", num_tiles=64), tiled_cross_entropy):
        assert (
            compile_report(jax.value_and_grad(chosen, argnums=(0, 1)), *LLAMA_8B, chip="v6e-1").peak_bytes
            <= 2.25 * gib  # all that the compiler lays out, gaps between buffers included
        )
        assert compile_report(chosen, *LLAMA_8B, chip="v6e-1").temp_bytes <= 0.15 * gib
