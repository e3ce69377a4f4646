import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from norms import relative_errors

import jaxmem
import llamem
from llamem.layers.attention import causal_attention
from llamem.layers.attention_splash import SPLASH_BLOCK
from llamem.layers.attention_tiles import KEY_TILE, QUERY_TILE, flash_attention
from llamem.layers.remat import checkpoint

pytestmark = pytest.mark.accelerator


def arrays(T, S=None, H=6, K=2, size=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(T), 4)
    S = S or T
    shapes = [(2, T, H, size), (2, S, K, size), (2, S, K, size), (2, T, H, size)]
    return [3 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def value_and_gradients(attend, q, k, v, weights):
    """The output, and the gradients of its weighted sum."""

    def value(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return np.asarray(out), [np.asarray(grad) for grad in grads]


@functools.cache
def expected_of(T, K):
    with reference.float64():
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays(T, K=K)]
        return value_and_gradients(lambda q, k, v: reference.attention(q, k, v, np.arange(T)), *exact)


@pytest.mark.parametrize(("T", "K"), [(1, 2), (5, 6), (QUERY_TILE, 1), (2 * KEY_TILE + 45, 2)])
@pytest.mark.parametrize("implementation", ["xla", "tiled", "auto"])
def test_values_and_gradients_equal_float64(T, K, implementation):
    attend = functools.partial(causal_attention, implementation=implementation)
    out, got = value_and_gradients(attend, *arrays(T, K=K))
    expected, wanted = expected_of(T, K)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=5e-5)
    # With one key the gradients of queries and keys are 0, and what is found is what rounding leaves of larger terms.
    rounding = 2e-6 * max(np.linalg.norm(b) for b in wanted)
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 1e-5 * np.linalg.norm(b) + rounding


@pytest.mark.quick
@pytest.mark.parametrize("implementation", ["xla", "tiled"])
def test_queries_at_given_positions(implementation):
    q, k, v, _ = arrays(7, S=20)
    positions = jnp.array([3, 4, 9, 0, 19, 5, 6])
    got = causal_attention(q, k, v, q_positions=positions, implementation=implementation)
    expected = reference.attention(q, k, v, positions)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# Of the packed documents; the last one is padding. A tile of keys is hidden from whole tiles of queries.
ENDS = (3, 300, 1000, 1111)


@functools.cache
def each_document_alone(dtype):
    """Start, end, output and gradients of each document, in float64."""
    found = []
    with reference.float64():
        for start, end in zip((0, *ENDS), ENDS[:3], strict=False):
            exact = [jnp.asarray(np.asarray(a[:, start:end], np.float64)) for a in arrays(ENDS[-1], dtype=dtype)]
            attend = functools.partial(reference.attention, positions=np.arange(end - start))
            found.append((start, end, *value_and_gradients(attend, *exact)))
    return found


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_documents_and_padding_equal_each_document_alone(implementation, dtype):
    q, k, v, weights = arrays(ENDS[-1], dtype=dtype)
    segments = jnp.broadcast_to(jnp.array(np.repeat([7, 2, 5, 0], np.diff([0, *ENDS]))), (2, ENDS[-1]))

    def value(q, k, v):
        out = causal_attention(q, k, v, segments_BT=segments, implementation=implementation)
        return jnp.sum((out * weights)[:, : ENDS[2]].astype(jnp.float32)), out

    (_, out), got = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2

    def assert_close(mine, exact, where):
        assert np.linalg.norm(np.asarray(mine, np.float64) - exact) < tolerance * np.linalg.norm(exact), where

    for start, end, wanted, grads in each_document_alone(dtype):
        assert_close(out[:, start:end], wanted, start)
        for mine, theirs in zip(got, grads, strict=True):
            assert_close(mine[:, start:end], theirs, start)
    assert all(np.isfinite(np.float32(a)).all() and not np.any(np.float32(a[:, ENDS[2] :])) for a in got)


def temporaries(implementation, T, chip="cpu", heads=4, kv_heads=4, size=16, dtype=jnp.float32):
    q = jax.ShapeDtypeStruct((1, T, heads, size), dtype)
    k = jax.ShapeDtypeStruct((1, T, kv_heads, size), dtype)

    def loss(q, k, v):
        return jnp.sum(causal_attention(q, k, v, implementation=implementation).astype(jnp.float32) ** 2)

    return jaxmem.compile_report(jax.grad(loss, argnums=(0, 1, 2)), q, k, k, chip=chip).parts["temporaries"]


def test_tiled_attention_stores_no_square():
    assert temporaries("xla", 4096) > 3.5 * temporaries("xla", 2048)
    assert temporaries("tiled", 8192) < 2.2 * temporaries("tiled", 4096)
    assert temporaries("tiled", 4096) < temporaries("xla", 4096) / 8


@pytest.mark.parametrize(
    "chip",
    [pytest.param("v5e-1", marks=pytest.mark.tpu_compile), pytest.param("a100-40", marks=pytest.mark.gpu_compile)],
)
def test_tiled_attention_of_llama_3_on_real_chips(chip):
    """At 8,192 tokens at most an eighth of XLA's temporaries, with the heads of Llama 3 8B."""
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    shape = {"chip": chip, "heads": 32, "kv_heads": 8, "size": 128, "dtype": jnp.bfloat16}
    assert temporaries("tiled", 8192, **shape) < temporaries("xla", 8192, **shape) / 8


def test_only_tiles_below_the_diagonal_are_computed():
    T = 8 * KEY_TILE
    q = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)

    def flops(**options):
        def fn(q, k, v):
            return causal_attention(q, k, v, implementation="tiled", **options)

        return jaxmem.compile_report(fn, q, q, q).matmul_flops

    square = 2 * 2 * T * T * 2 * 8
    assert flops(q_positions=jnp.arange(T)) == square
    assert flops() == square * (8 * 9 / 2) / 64


def test_saving_attn_spares_the_forward_pass():
    q, k, v, _ = arrays(700)

    def products(remat):
        def fn(q, k, v):
            return jnp.sum(causal_attention(q, k, v, implementation="tiled") ** 2)

        return str(jax.make_jaxpr(jax.grad(checkpoint(fn, remat)))(q, k, v)).count("dot_general")

    assert products("nothing") - products("attn") == 2 and products("attn") == products(None)


@pytest.mark.usefixtures("as_a_user")
def test_what_does_not_fit_or_cannot_be_computed_is_said():
    q, k, v, _ = arrays(7)
    segments, positions = jnp.zeros((2, 7), jnp.int32), jnp.arange(7)
    shapes = [(q[:, :, :5], k, v), (q, k, v[:, :, :1]), (q, k[:1], v[:1]), (q, k[..., :4], v[..., :4]), (q[0], k, v)]
    said: list[tuple[Any, Any, str]] = [(bad, {}, "K key/value heads divide the H query heads") for bad in shapes]
    said += [
        ((q, k, v), {"implementation": "splash"}, "multiple of 512, got T=7"),
        (
            arrays(512)[:3],
            {"implementation": "splash"},
            "a kernel for TPUs, and this program is for 'cpu'. Use 'tiled'",
        ),
        ((q, k, v), {"implementation": "cudnn", "q_positions": positions}, "whole sequences"),
        ((q, k, v), {"segments_BT": segments, "q_positions": positions}, "whole sequences"),
        ((q, k, v), {"implementation": "cudnn", "segments_BT": segments}, "packed documents"),
        ((q, k, v), {"implementation": "flash"}, "implementation='flash'"),
        ((q, k, v), {"segments_BT": segments[0]}, r"segments_BT has shape \(7,\): expected one number per token"),
    ]
    for given, options, words in said:
        with pytest.raises(ValueError, match=words):
            causal_attention(*given, **options)
    nothing, few = (q[:, :0], k[:, :0], v[:, :0]), (q[:, :2], k, v)
    both = [(bad, {}, "K key/value heads divide the H query heads") for bad in [*shapes, nothing, (q, *nothing[1:])]]
    both += [(few, {}, "attention of 2 queries over 7 keys needs their positions: where do the queries stand")]
    both += [((q, k, v), {"segments_BT": segments[0]}, r"segments_BT has shape \(7,\): expected one number per token")]
    for given, options, words in both:
        for attention in (causal_attention, flash_attention):
            with pytest.raises(ValueError, match=words):
                attention(*given, **options)


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
def test_no_sequences_are_no_answers(implementation):
    q, k, v, _ = arrays(7)
    assert causal_attention(q[:0], k[:0], v[:0], implementation=implementation).shape == (0, *q.shape[1:])


def test_masks_are_not_computed_ahead_and_stored():
    """In a rematerialised loop over layers JAX moves what depends on no weight out: masks of all pairs of tiles."""
    T = 2 * KEY_TILE
    q, k, v, _ = arrays(T)

    def loss(scales):
        def layer(scale, x):
            return causal_attention(scale * x, k, v, implementation="tiled")

        return jnp.sum(llamem.apply_stack(layer, scales, q, remat="nothing") ** 2)

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3)))
    masks = {math.prod(map(int, shape.split(","))) for shape in re.findall(r"bool\[([\d,]+)\]", program)}
    assert 0 < max(masks) <= q.shape[0] * 6 * QUERY_TILE * KEY_TILE


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_splash_equals_the_reference_where_a_cpu_interprets_it(monkeypatch, packed):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    monkeypatch.setattr(kernels, "make_splash_mha", functools.partial(kernels.make_splash_mha, interpret=True))
    monkeypatch.setattr("llamem.layers.attention_splash.compiling_for", lambda: "TPU")
    q, k, v, weights = arrays(SPLASH_BLOCK, H=4, K=2, size=128)
    segments = jnp.broadcast_to(jnp.arange(SPLASH_BLOCK) // 200, (2, SPLASH_BLOCK)) if packed else None

    def value(q, k, v, implementation):
        out = causal_attention(q, k, v, segments_BT=segments, implementation=implementation)
        return jnp.sum(out * weights), out

    grads = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)
    (_, out), got = grads(q, k, v, "splash")
    (_, expected), wanted = grads(q, k, v, "xla")
    for a, b in zip((out, *got), (expected, *wanted), strict=True):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("T", "S", "packed"), [(QUERY_TILE + 45, 2 * KEY_TILE + 7, False), (3, 600, False), (700, 700, True)]
)
def test_attention_to_every_key_equals_float64_in_tiles(T, S, packed):
    """An encoder's or a diffusion transformer's attention, over other tokens, or over packed documents."""
    q, k, v, weights = arrays(T, S)
    numbers_T = np.arange(T) // 150 if packed else None
    segments = None if numbers_T is None else jnp.broadcast_to(numbers_T, (2, T))

    def at_once(q, k, v):
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        if numbers_T is not None:
            scores = jnp.where(numbers_T[:, None] == numbers_T, scores, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)

    with reference.float64():
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v, weights)]
        expected, wanted = value_and_gradients(at_once, *exact)
    attend = functools.partial(flash_attention, segments_BT=segments, causal=False)
    found, got = value_and_gradients(attend, q, k, v, weights)
    assert max(relative_errors((found, got), (expected, wanted))) < 1e-5
    with pytest.raises(ValueError, match="queries and keys"):
        flash_attention(q, k[:, :2], v[:, :2], segments_BT=jnp.zeros((2, T), int), causal=False)
