"""What waits in the host's memory of an NVIDIA GPU that is not there: read back from where it was written, and counted
once.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
import llamem
from llamem.layers import host_memory

needs_gpu_compiler = pytest.mark.skipif(not jaxmem.available("a100-40"), reason="needs the CUDA plugin and ptxas")
L, N, D = 5, 384, 256
HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def layer(w, x):
    x = checkpoint_name(x, "layer_in")
    return x + jnp.tanh(x @ w) @ w.T


def gradient(ws, x):
    policy = llamem.Policy(offload=("layer_in",))
    return jax.grad(lambda ws: jnp.sum(llamem.apply_stack(layer, ws, x, remat=policy) ** 2))(ws)


def on_gpu(fn, *shapes, hosted=(), **options) -> jaxmem.Report:
    args = [
        jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=HOST if i in hosted else None)
        for i, sizes in enumerate(shapes)
    ]
    return jaxmem.compile_report(fn, *args, chip="a100-40", cache=False, **options)


@needs_gpu_compiler
@pytest.mark.gpu_compile
def test_what_is_offloaded_lies_on_the_host():
    assert on_gpu(gradient, (L, D, D), (N, D)).host_bytes == L * N * D * 4


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.10.1", "0.11.1"])
def test_offloading_on_a_gpu_at_hand_is_refused_where_it_would_be_read_back_wrongly(monkeypatch, version):
    shapes = jax.ShapeDtypeStruct((L, D, D), jnp.float32), jax.ShapeDtypeStruct((N, D), jnp.float32)
    monkeypatch.setattr(host_memory.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory.jaxlib, "__version__", version)
    if version in ("0.10.1", "0.11.1"):
        jax.eval_shape(gradient, *shapes)
        return
    with pytest.raises(RuntimeError, match=rf"apply_stack\(remat=.*jaxlib {version}.*from the wrong layer.*0.10.1"):
        jax.eval_shape(gradient, *shapes)
    with jax.sharding.use_abstract_mesh(jaxmem.CHIPS["v5e-1"].mesh(x=1)):  # which is for another chip
        jax.eval_shape(gradient, *shapes)


def frozen(ws, x):
    def body(x, w):
        return x + jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)), None

    return jax.lax.scan(body, x, ws)[0]


def donated(ws, xs):
    def body(ws, at):
        i, x = at
        w = jax.device_put(jax.lax.dynamic_index_in_dim(ws, i, keepdims=False), jax.memory.Space.Device)
        new = jax.device_put(w + x, jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(ws, new, i, 0), jnp.sum(w)

    return jax.lax.scan(body, ws, (jnp.arange(L), xs))


@needs_gpu_compiler
@pytest.mark.gpu_compile
def test_arguments_in_the_hosts_memory_compile_to_code_and_count_once(as_a_user):
    """A frozen argument, and one that is donated and given back; quick answers are those of whole compiles."""
    stack = L * D * D * 4
    for depth in ("memory", "code"):
        still = on_gpu(frozen, (L, D, D), (N, D), hosted=(0,), depth=depth)
        assert (still.host_bytes, still.argument_bytes) == (stack, N * D * 4)
        changed = on_gpu(donated, (L, D, D), (L, D, D), hosted=(0,), donate_argnums=(0,), depth=depth)
        assert (changed.host_bytes, changed.argument_bytes) == (stack, stack)
        assert changed.output_bytes < 4096
