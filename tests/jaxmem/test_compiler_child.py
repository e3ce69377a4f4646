"""The child process in which an absent chip's compiler runs, without a compiler: what it inherits, and when it ends."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

from jaxmem import cross_compile as absent
from jaxmem.answers import Question, cached
from jaxmem.chips import compiler_process, compilers
from jaxmem.chips.chip import CHIPS
from jaxmem.reading import dump

TOO_BIG = "RESOURCE_EXHAUSTED: E1000: the memory required for HLO temporaries (20.5G) exceeds 15.75G"


@pytest.fixture
def stands_in(monkeypatch, tmp_path):
    """A shell script in place of Python and the compiler."""

    def run(script: str) -> dict:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(compilers.sys, "executable", str(python))
        return absent.compile_absent(absent.Request(CHIPS["v5e-1"], compilers.Compilers("those of a test"), b""))

    return run


def test_what_the_child_inherits(stands_in, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--option")
    monkeypatch.setenv("XLA_FLAGS", "--option")
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    script = (
        'echo "said: $JAX_ENABLE_X64, ${LIBTPU_INIT_ARGS-none}, ${XLA_FLAGS-none}, '
        '$(test -p /dev/stdin && echo a pipe)"; exit 3'
    )
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(RuntimeError, match=r"exit status 3.*said: 1, none, none, a pipe"):
            stands_in(script)
    finally:
        jax.config.update("jax_enable_x64", False)


WRITES = """p="$3/dump/m.jit_call.after_optimizations"; a=$p-buffer-assignment.txt; mkdir "$3/dump"
printf 'allocation 0: size 12, parameter 0\\nallocation 1: size {temporary}, preallocated-temp\\n' > $a
echo "Total bytes: {total} (42B)" > $p-memory-usage-report.txt
touch ${{p}}_after_buffer_assignment.txt; sleep 60"""


def test_a_product_without_tiles_is_compiled_by_the_library(stands_in):
    refusal = json.dumps({"error": "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot"})
    refuses = f"""if ! grep -q '"xla_gpu_enable_triton_gemm": false' "$3/request.json"; then
cat > "$3/answer.json" <<'END'
{refusal}
END
exit; fi
"""
    answer = stands_in(refuses + WRITES.format(temporary=30, total=42))
    assert answer["products_by_library"] and answer["temp_bytes"] == 30
    assert "products_by_library" not in stands_in(WRITES.format(temporary=30, total=42))


def test_memory_that_is_assigned_without_a_text_of_the_program_is_an_answer(stands_in):
    answer = stands_in(WRITES.format(temporary=30, total=42))
    assert answer["argument_bytes"] == 12 and answer["compiled_matmul_flops"] is None
    assert not answer["buffers"] and not answer["collectives"]


@pytest.mark.quick
def test_a_dump_that_is_cut_short_is_no_answer(stands_in):
    with pytest.raises(OSError, match=rf"folder {tempfile.gettempdir()}: .*42 of 142 bytes of memory.*TMPDIR"):
        stands_in(WRITES.format(temporary=30, total=142))
    assert stands_in(WRITES.format(temporary=30, total=42))["temp_bytes"] == 30


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_temporary_folder_is_named(tmp_path):
    (tmp_path / "room").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        dump.check_room(tmp_path)


def test_the_child_ends_with_its_parent_and_removes_its_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "request.json")  # at which the child waits for ever
    command = [sys.executable, "-P", str(Path(compiler_process.__file__)), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.poll() is None and child.stdin is not None
        child.stdin.close()  # as the system does for a parent that ended
        assert child.wait(timeout=120) == 1
    assert not folder.exists()


def test_only_a_refusal_as_too_big_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    assert dump.needed_bytes(TOO_BIG) == int(20.5 * 2**30)
    for error, compiled in ((TOO_BIG, 1), ("UNAVAILABLE: the TPU is in use by another process", 2)):
        asked, there = [], compilers.Compilers("a compiler")
        question = Question(CHIPS["v5e-1"], error, "", (), jax.make_jaxpr(abs)(1.0), ())
        for _ in range(2):
            answer = cached(question, there, lambda error=error, asked=asked: asked.append(1) or _refusal(error))
            assert answer["error"] == error
        assert len(asked) == compiled


def _refusal(error: str) -> dict:
    return {"error": error, "compile_seconds": 0.0}
