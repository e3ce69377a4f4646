import gc
import importlib
import importlib.util
import os
import runpy
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The older way to write loops takes half of the time to compile, and one module of code for a small program a fifth
# less than several. A flag that another version lacks ends the process.
FASTER = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
FASTER = FASTER if version("jaxlib") == "0.10.1" else ""
# Before JAX is imported, for this process and the children of tests. Tests compile thousands of small programs and run
# most of them once, so LLVM's optimisations cost more than they bring. XLA's own, which decide about memory and
# products, are all on. What one test, worker or run has compiled is found again by the next.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0" + FASTER)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# jaxlib 0.10.1 calls what it reads from that cache an error, in thousands of lines, and runs it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A sentence of a notebook that does not hold fails here; a reader is told of it, and his run goes on.
os.environ.setdefault("LLAMEM_CLAIMS", "raise")
# Traces are millions of objects, and nearly all stay in JAX's caches. Looking through them again and again took 7 % of
# the time of tests/llama and tests/layers.
gc.set_threshold(200_000, 100, 100)
# No noise of JAX's, as for `import llamem`, which itself is imported later, under the run-time type checks.
runpy.run_path(str(ROOT / "src" / "jaxmem" / "_startup.py"))
# The chips' compilers are where they were fetched to, also for tests with a cache of their own.
cache_folder = runpy.run_path(str(ROOT / "src" / "jaxmem" / "common" / "files.py"))["cache_folder"]
os.environ.setdefault("JAXMEM_COMPILERS", str(cache_folder("compilers")))

import jax
import jaxtyping
import pytest


@pytest.fixture
def as_a_user():
    """Without the tests' run-time type checks, so that bad input meets the error a user would meet."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request):
    """JAX's coming way to rematerialise, off and on."""
    if request.param and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no jax_remat3")
    if hasattr(jax.config, "jax_remat3"):
        old = jax.config.jax_remat3
        jax.config.update("jax_remat3", request.param)
        jax.clear_caches()
        yield
        jax.config.update("jax_remat3", old)
        jax.clear_caches()
    else:
        yield


@pytest.fixture(scope="session")
def smollm2():
    """The real model, dequantised to f32."""
    llamem = importlib.import_module("llamem")
    return llamem.load_pretrained(importlib.import_module("llamem.files").smollm2_file(), dtype="float32")


@pytest.fixture(scope="session")
def smollm2_blocks():
    """The real model in its own four bits, computed in f32."""
    llamem = importlib.import_module("llamem")
    return llamem.load_pretrained(importlib.import_module("llamem.files").smollm2_file(), compute_dtype="float32")


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    text, files = (importlib.import_module(f"llamem.{folder}") for folder in ("text", "files"))
    return text.Tokenizer(files.smollm2_file())


def pytest_addoption(parser):
    parser.addoption("--weekly", action="store_true", help="run the tests marked weekly, too")


class ReadersEnvironment:
    """The kernel of a notebook compiles as a reader's does, on the CPU, and finds again what the run before compiled.

    A plugin, since hooks of this file are not asked about notebooks, which lie in other folders.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        if item.path.suffix != ".ipynb":
            return (yield)
        before = os.environ.copy()
        os.environ.pop("XLA_FLAGS", None)
        os.environ["JAX_PLATFORMS"] = "cpu"
        # A folder of its own: what another process has half written, JAX says in the output of a cell.
        os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{item.path.stem}"
        try:
            return (yield)
        finally:
            os.environ.clear()
            os.environ.update(before)


def pytest_configure(config):
    config.pluginmanager.register(ReadersEnvironment())


def pytest_collection_modifyitems(config, items):
    """Notebooks and files with slow tests first, so that no worker is left with one of them at the end."""
    for item in items:
        if item.path.parent.name == "docs" and item.path.name != "flax_nnx.ipynb":
            item.add_marker("weekly")  # pages alike: one of them on every push
        if item.path.name == "pytorch.ipynb" and importlib.util.find_spec("torchax") is None:
            item.add_marker(pytest.mark.skip(reason="no torchax, which `make parity` installs"))
    if not config.getoption("--weekly"):
        weekly = [item for item in items if item.get_closest_marker("weekly")]
        items[:] = [item for item in items if item not in weekly]
        config.hook.pytest_deselected(items=weekly)
    slow = {item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item):
    """Skip what needs the compiler of an absent chip where it is not installed."""
    for mark, chip in (("tpu_compile", "v5e-1"), ("gpu_compile", "h100")):
        if item.get_closest_marker(mark) and not importlib.import_module("jaxmem").available(chip):
            pytest.skip(f"no compiler for {chip} here")


def pytest_terminal_summary(terminalreporter):
    """One line on what was skipped, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        told = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} skipped: {told}")
