"""What waits in the host's memory of an NVIDIA GPU that is not there: read back from where it was written, and counted
once.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import llamem
from llamem.memory import compiling, gpu_offload, slice_notes
from llamem.memory.hlo import parse

needs_gpu_compiler = pytest.mark.skipif(not llamem.available("a100-40"), reason="needs the CUDA plugin and ptxas")
L, N, D = 5, 384, 256
HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def layer(w, x):
    x = checkpoint_name(x, "layer_in")
    return x + jnp.tanh(x @ w) @ w.T


def gradient(ws, x):
    policy = llamem.Policy(offload=("layer_in",))
    return jax.grad(lambda ws: jnp.sum(llamem.apply_stack(layer, ws, x, remat=policy) ** 2))(ws)


def on_gpu(fn, *shapes, hosted=(), **options) -> llamem.Report:
    args = [
        jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=HOST if i in hosted else None)
        for i, sizes in enumerate(shapes)
    ]
    return llamem.compile_report(fn, *args, chip="a100-40", cache=False, **options)


def check_text(text: str) -> slice_notes.SliceNotes:
    return slice_notes.check_slice_notes(parse(text))


@pytest.fixture
def texts(monkeypatch):
    """The programs that compilers wrote, as reports read them."""
    seen = []

    def parsed(text: str):
        seen.append(text)
        return parse(text)

    monkeypatch.setattr("llamem.memory.dump.parse", parsed)
    return seen


@needs_gpu_compiler
@pytest.mark.gpu_compile
@pytest.mark.skipif(not gpu_offload.has_wrong_slices(), reason="this jaxlib's compiler does not have the fault")
def test_offloaded_residuals_are_read_back_from_where_they_were_written(texts, monkeypatch):
    cured = on_gpu(gradient, (L, D, D), (N, D))
    assert cured.host_bytes == L * N * D * 4 and not any("another place" in note for note in cured.warnings)
    assert check_text(texts[-1]) == slice_notes.SliceNotes(0, ())

    monkeypatch.setattr(compiling, "offload_options", lambda *_: {})
    as_it_comes = on_gpu(gradient, (L, D, D), (N, D))
    notes = check_text(texts[-1])
    assert len(notes.wrong) == 1 and notes.right >= 4
    size = N * D * 4  # of one layer's input: the last is wanted first
    assert f"turn 0: byte {(L - 1) * size:,}, noted 0" in notes.wrong[0]
    assert any(
        note.startswith("WRONG NUMBERS: 1 slices are read or written at another place") for note in as_it_comes.warnings
    )
    # Nothing but the notes differs: the bytes are the same.
    assert (as_it_comes.peak_bytes, as_it_comes.host_bytes) == (cured.peak_bytes, cured.host_bytes)
    mended = re.sub(rf'"0","byte_stride":"{size}"', f'"{(L - 1) * size}","byte_stride":"-{size}"', texts[-1])
    assert mended != texts[-1] and len(check_text(mended).wrong) == 1  # now it is the write


def test_who_jits_an_offloading_stack_for_the_gpu_at_hand_is_warned(monkeypatch):
    shapes = jax.ShapeDtypeStruct((L, D, D), jnp.float32), jax.ShapeDtypeStruct((N, D), jnp.float32)
    monkeypatch.setattr(gpu_offload.jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(gpu_offload.jaxlib, "__version__", "0.10.2")
    with pytest.warns(gpu_offload.WrongOffloadWarning, match=r"apply_stack\(remat=.*0.10.2.*compiler_options"):
        jax.eval_shape(gradient, *shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpu_offload.offloads_rightly():
            jax.eval_shape(gradient, *shapes)
        monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dynamic-slice-annotator")
        jax.eval_shape(gradient, *shapes)
        monkeypatch.delenv("XLA_FLAGS")
        monkeypatch.setattr(gpu_offload.jaxlib, "__version__", "0.11.1")
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
