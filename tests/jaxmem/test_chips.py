"""Chips by name: what is known of them, what is refused with a remedy, and silence where there is no accelerator."""

import dataclasses
import glob
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxmem
import llamem
from jaxmem.chips import names as chip_names

ACCELERATOR = any(glob.glob(pattern) for pattern in ("/dev/nvidia*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd"))
needs_gpu_compiler = pytest.mark.skipif(not jaxmem.available("a100-40"), reason="needs the CUDA plugin and ptxas")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the local device is no CPU")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_", "XLA_", "TF_CPP"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.quick
@pytest.mark.skipif(ACCELERATOR or sys.platform != "linux", reason="an accelerator is there, and is looked for")
def test_importing_is_silent_and_does_not_look_for_chips_that_are_not_there():
    done = python("import llamem, jax; print(jax.devices()[0].platform)")
    assert (done.returncode, done.stdout) == (0, "cpu\n")
    assert done.stderr == ""
    loud = python("import sys, llamem; print('heard', file=sys.stderr); 1 / 0")
    assert loud.stderr.startswith("heard\n") and "ZeroDivisionError" in loud.stderr


@pytest.mark.skipif(ACCELERATOR, reason="an accelerator is there")
def test_what_the_user_chose_stays():
    chosen = python("import llamem, jax; print(jax.config.jax_platforms)", JAX_PLATFORMS="cpu,interpreter")
    assert chosen.stdout == "cpu,interpreter\n"
    first = python(
        "import jax; jax.config.update('jax_platforms', 'tpu'); import llamem; print(jax.config.jax_platforms)"
    )
    assert first.stdout == "tpu\n"
    started = python("import jax; jax.devices(); import llamem; print(jax.devices()[0].platform)")
    assert started.stdout == "cpu\n"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A100-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("v5litepod-8", "v5e-8"),
        ("TPU v6 lite", "v6e-1"),
        ("V5E:2x4", "v5e:2x4"),
    ],
)
def test_chips_as_people_write_them(written, name):
    found = chip_names.known_chip(written)
    assert found is not None and found.name == name
    assert chip_names.known_chip(f"{written} of mine") is None


@needs_gpu_compiler
@pytest.mark.gpu_compile
def test_what_gpus_of_the_table_say_of_bf16(tmp_path, monkeypatch):
    """A T4 multiplies bf16 in f32, and the report says so; a card of one's own is one more entry."""
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    mine = dataclasses.replace(jaxmem.CHIPS["rtx5090"], name="mine", capacity_bytes=3 * 10**6)
    monkeypatch.setitem(jaxmem.CHIPS, "mine", mine)
    sizes, copies = (640, 768), {}
    for name, dtype in (("t4", "bfloat16"), ("t4", "float16"), ("mine", "bfloat16")):
        x = jax.ShapeDtypeStruct(sizes, dtype)
        report = jaxmem.compile_report(lambda x: x @ x.T, x, chip=name)
        noted = [note for note in report.warnings if f"bf16 is not native on {name}" in note]
        copies[name, dtype] = report.temp_bytes
        assert len(noted) == ((name, dtype) == ("t4", "bfloat16"))
    assert copies["t4", "bfloat16"] - copies["t4", "float16"] >= 4 * 640 * 768  # of the operand, in f32
    assert jaxmem.CHIPS["t4"].bf16_flops == pytest.approx(8.1e12, rel=0.01)
    seconds = llamem.estimate(llamem.LlamaConfig.from_name("tiny"), llamem.Plan(), "mine", seq_len=512).seconds
    assert seconds.total > 0


@needs_gpu_compiler
def test_what_is_not_compiled_for_absent_gpus_is_said():
    q = jax.ShapeDtypeStruct((2, 512, 8, 64), "bfloat16")
    with pytest.raises(RuntimeError, match=r"cuDNN (?s:.*)not compiled for a GPU that is not here.*local"):
        jaxmem.compile_report(
            lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn"), q, chip="h100"
        )


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"no chip is called 'v99'. Known: local, cpu, gpu, tpu, v5e-1, .*h100"):
        jaxmem.find_chip("v99")
    with pytest.raises(ValueError, match="v99"):
        jaxmem.compile_report(lambda x: x, 1.0, chip="v99")


@pytest.mark.parametrize(("name", "devices"), [("v5e:16x16", 256), ("v5p:4x4x8", 128)])
def test_tpus_by_how_they_are_connected(name, devices):
    found = chip_names.pod(name)
    assert found is not None
    assert (found.name, found.topology, found.devices) == (name, name, devices)
    one = jaxmem.CHIPS[f"{name.partition(':')[0]}-1"]
    mesh = found.mesh(fsdp=devices // 4, tensor=4)
    assert found.capacity_bytes == one.capacity_bytes and mesh.size == devices
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}  # and not what JAX takes where nobody says it
    for odd in ("v5e:16x16x2", "v5e:0x4", "v9:2x2", "h100:1x8", "v7x:2x2x1", "v7x:2x2x2x2"):
        with pytest.raises(ValueError, match=r"no chip is called.*'v5p:4x4x8'"):
            jaxmem.find_chip(odd)


@on_cpu
def test_the_local_device():
    assert jaxmem.find_chip("local").platform == jaxmem.find_chip("cpu").platform == "cpu"
    assert not jaxmem.find_chip("local").absent and jaxmem.find_chip("cpu").capacity_bytes is None
    for kind in ("gpu", "tpu"):
        with pytest.raises(RuntimeError, match=rf"the local device is a cpu \(.*\), not a {kind}.*h100"):
            jaxmem.find_chip(kind)
        assert not jaxmem.available(kind)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("spread", [False, True])
def test_arguments_in_the_hosts_memory_of_several_chips_are_refused_by_name(as_a_user, spread):
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    if spread:
        mesh = jaxmem.find_chip("v5e-4").mesh(data=4)
        there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    state = {"mu": jax.ShapeDtypeStruct((3, 5), "float32", sharding=there)}
    with pytest.raises(ValueError, match=r"args\[0\]\['mu'\] is in the memory 'pinned_host'.*one chip.*v5e-4"):
        jaxmem.compile_report(lambda state: state["mu"], state, chip="v5e-4")


def asks_its_device(x):
    on_cpu = jax.local_devices()[0].platform == "cpu"
    return jnp.sin(x) if on_cpu else x


@pytest.mark.parametrize("chip", [pytest.param("v5e-1", marks=pytest.mark.tpu_compile), "local"])
def test_a_program_that_asks_which_device_it_is_on_is_told_of(chip):
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    x, asking = jax.ShapeDtypeStruct((8, 128), jnp.float32), jax.local_devices
    told = [jaxmem.compile_report(fn, x, chip=chip).warnings for fn in (asks_its_device, jnp.tanh)]
    notes = [[note for note in notes if "asks which device it runs on" in note] for notes in told]
    assert [len(row) for row in notes] == ([0, 0] if chip == "local" else [1, 0])
    assert chip == "local" or "jax.local_devices() in test_chips.py:" in notes[0][0]
    assert jax.local_devices is asking


# What a runtime shows of its devices: platform, kind, bytes that a program can use, how many.
RUNTIMES = {
    "Colab's T4": ("cuda", "Tesla T4", 15_655_829_504, 1, "t4"),
    "Colab's v5e-1": ("tpu", "TPU v5 lite", 16_911_433_728, 1, "v5e-1"),
    "Kaggle's v5e-8": ("tpu", "TPU v5 lite", 16_911_433_728, 8, "v5e-1"),
    "Kaggle's T4 x 2": ("cuda", "Tesla T4", 15_655_829_504, 2, "t4"),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_chip_at_hand_in_a_free_runtime(monkeypatch, runtime):
    """As far as it can be simulated: `local` is one device, of the kind and size that the table knows."""
    platform, kind, size, count, known = RUNTIMES[runtime]
    device = types.SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: {"bytes_limit": size})
    monkeypatch.setattr(jax, "local_devices", lambda *_: [device] * count)
    chip = jaxmem.find_chip("local")
    assert (chip.platform, chip.absent, chip.devices, chip.capacity_bytes) == (platform, False, 1, size)
    assert jaxmem.find_chip("gpu" if platform == "cuda" else "tpu").device_kind == kind
    assert chip.has_bf16 == (kind != "Tesla T4")
    assert abs(size / (jaxmem.CHIPS[known].capacity_bytes or 0) - 1) < 0.001  # compiled for it, it is the same question
