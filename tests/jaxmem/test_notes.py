"""What a report says of a program that is probably not what was meant: the note, and the remedy in it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.tracing.jaxprs import is_ref

TX = optax.adamw(1e-3)
WEIGHTS = {"up": jax.ShapeDtypeStruct((384, 1024), jnp.float32), "down": jax.ShapeDtypeStruct((1024, 384), jnp.float32)}
X = jax.ShapeDtypeStruct((48, 384), jnp.float32)
STATE = 2 * 4 * 2 * 384 * 1024 + 4  # two moments of two arrays, and a count


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)


def step(p, m, x):
    changes, m = TX.update(jax.grad(loss)(p, x), m, p)
    return optax.apply_updates(p, changes), m


MOMENTS = jax.eval_shape(TX.init, WEIGHTS)


def notes(fn, *args, words, **options):
    return [note for note in jaxmem.compile_report(fn, *args, **options).warnings if words in note]


@pytest.mark.quick
def test_what_is_replaced_and_not_donated_is_said_with_the_line_that_does_it():
    words = "lie beside them"
    (note,) = notes(step, WEIGHTS, MOMENTS, X, words=words)
    assert "`p` and `m`: 9.00 MiB are not donated" in note and "donate_argnums=(0, 1)" in note
    (note,) = notes(step, WEIGHTS, MOMENTS, X, words=words, donate_argnums=(0,))
    assert "`m`: 6.00 MiB are not donated" in note and "donate_argnums=(0, 1)" in note
    assert not notes(step, WEIGHTS, MOMENTS, X, words=words, donate_argnums=(0, 1))
    # Gradients alone, and a layer's output, have the shapes of arguments that are still needed.
    assert not notes(jax.value_and_grad(loss), WEIGHTS, X, words=words)
    assert not notes(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"], WEIGHTS, jnp.ones((2048, 384)), words=words)


@pytest.mark.tpu_compile
def test_moments_without_a_sharding_are_named_with_what_to_do():
    if not jaxmem.available("v5e-8"):
        pytest.skip("no compiler for TPUs here")
    mesh = jaxmem.find_chip("v5e-8").mesh(fsdp=8)

    def cut(leaf):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*["fsdp"][: leaf.ndim]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    weights, x = jax.tree.map(cut, (WEIGHTS, X))
    options = {"chip": "v5e-8", "donate_argnums": (0, 1)}
    (note,) = notes(step, weights, MOMENTS, x, words="lies whole", **options)
    assert "`m` lies whole on each chip (6.00 MiB in 4 arrays)" in note and "optax.tree_map_params" in note

    def place(moment, weight):
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=weight.sharding)

    placed = optax.tree_map_params(TX, place, MOMENTS, weights)  # pyrefly: ignore[bad-argument-type]
    assert not notes(step, weights, placed, x, words="lies whole", **options)
    assert not notes(step, weights, placed, x, words="not used again", **options)

    before, after = (jaxmem.compile_report(step, weights, m, x, **options) for m in (MOMENTS, placed))
    (remedy,) = (one for one in before.advice if "cut over the mesh" in one.cause)
    assert remedy.compiled and remedy.bytes == before.peak_bytes - after.peak_bytes > 2**22

    def replicated(p, m, x):
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(step(p, m, x), everywhere)

    assert notes(replicated, weights, placed, x, words="not used again", **options)


def test_a_mutable_array_is_refused_by_name():
    make = getattr(jax, "new_ref", None) or getattr(jax, "array_ref", None)
    if make is None:
        pytest.skip("this JAX has no mutable arrays")
    ref = make(jnp.ones(3))
    assert is_ref(ref) and not is_ref(jnp.ones(3)) and not is_ref(3.0)
    with pytest.raises(TypeError, match=r"`state\['count'\]` is a mutable array .*jax\.freeze"):
        jaxmem.compile_report(lambda state: state["count"][...] + 1, {"count": ref})
