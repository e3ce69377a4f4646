"""Where the compilers of absent chips come from, that they appear whole, and what answers where there are none."""

import dataclasses
import re
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import __main__ as command
from jaxmem import answers
from jaxmem.chips import compilers
from llamem_course import notebook, recording

SHAPE = jax.ShapeDtypeStruct((384, 640), jnp.float32)


def product(x):
    return jnp.tanh(x @ x.T)


@pytest.fixture
def none_here(tmp_path, monkeypatch):
    """No compilers in an empty folder, and none of this environment's own."""
    monkeypatch.setenv("JAXMEM_COMPILERS", str(tmp_path / "compilers"))
    monkeypatch.setattr(compilers, "_is_installed", lambda module: False)
    return tmp_path / "compilers"


def fake_installer(monkeypatch, tmp_path, program: str):
    """Let this Python program stand for pip."""
    script = tmp_path / "installer.py"
    script.write_text("import sys, pathlib\ntarget = pathlib.Path(sys.argv[2])\n" + textwrap.dedent(program))
    monkeypatch.setattr(compilers, "_installer", lambda: [sys.executable, str(script)])


def package(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("named", "wanted"),
    [("libtpu==0.0.50.*; extra == 'tpu'", "libtpu>=0.0.51"), ("libtpu==0.1.2.*; extra == 'tpu'", "libtpu>=0.1.2")],
)
def test_a_newer_jax_gets_no_older_compiler_than_the_pinned_one(monkeypatch, named, wanted):
    monkeypatch.setattr(compilers.metadata, "requires", lambda name: ["numpy>=2.0", named])
    assert compilers._newer("tpu") == wanted


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tracing", "own", "folders", "answers"),
    [
        ((0, 7, 2), True, ["0.10.1"], "jax 0.10.1, libtpu 0.0.51, own folder"),
        ((0, 10, 2), False, ["0.10.1"], "jax 0.10.1, libtpu 0.0.51, own folder"),
        ((0, 12, 0), False, ["0.10.1"], None),  # a compiler need not read what a newer JAX traces
        ((0, 12, 0), False, ["0.10.1", "0.12.0"], "jax 0.12.0, libtpu 0.0.51, own folder"),
        ((0, 12, 0), True, ["0.10.1"], "this environment"),
        ((0, 7, 2), True, [], None),  # its own, of jaxlib 0.7, is not whole
    ],
)
def test_which_compilers_answer(none_here, monkeypatch, tracing, own, folders, answers):
    version = ".".join(map(str, tracing))
    monkeypatch.setattr(jax, "__version_info__", tracing)
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(compilers.jaxlib, "__version__", version)
    monkeypatch.setattr(compilers, "_is_installed", lambda module: own)
    known = {"jax": version, "libtpu": "0.0.52"}
    real = compilers.metadata.version
    monkeypatch.setattr(compilers.metadata, "version", lambda name: known.get(name) or real(name))
    for folder in folders:
        whole = none_here / f"jax-{folder}-{sys.implementation.cache_tag}"
        package(whole / "jax", "jax", folder)
        package(whole / "tpu", "libtpu", "0.0.51")
    found = compilers.find_compilers("tpu")
    assert (None if found is None else found.name) == (
        answers if answers != "this environment" else "jax 0.12.0, libtpu 0.0.52, this environment"
    )


def test_the_lock_is_of_the_same_jax():
    pinned = dict(re.findall(r"^(\S+)==(\S+)", compilers.PINS.read_text(), re.MULTILINE))
    lock = (compilers.PINS.parents[3] / "requirements" / "lock.txt").read_text()
    for name in ("jax", "jaxlib", "numpy", "ml-dtypes"):
        assert re.search(rf"^{name}=={re.escape(pinned[name])}( |$)", lock, re.MULTILINE), name


def test_a_missing_compiler_says_how_to_get_it(none_here, monkeypatch):
    for chip, kind in (("v5e-1", "tpu"), ("h100", "gpu")):
        with pytest.raises(
            ImportError, match=rf"fetch_compilers\('{kind}'\).*python -m jaxmem compilers --chip {kind}"
        ):
            jaxmem.find_chip(chip)
        with pytest.raises(ImportError, match="fetch_compilers"):
            jaxmem.compile_report(product, SHAPE, chip=chip)
        assert not jaxmem.available(chip)
    (none_here / "jax-0.9.0-cpython-311").mkdir(parents=True)
    with pytest.raises(ImportError, match=r"holds only jax-0.9.0-cpython-311, and jax-.* is needed"):
        jaxmem.find_chip("v5e-1")
    monkeypatch.setattr(compilers.sys, "platform", "darwin")
    with pytest.raises(ImportError, match="for Linux on x86-64 only; this is darwin"):
        jaxmem.find_chip("v5e-1")
    with pytest.raises(RuntimeError, match="for Linux on x86-64 only; this is darwin"):
        jaxmem.fetch_compilers()


def test_bad_input_is_refused_before_anything_is_fetched(none_here, monkeypatch, as_a_user):
    with pytest.raises(ValueError, match=r"fetch_compilers\('v5e-1'\): expected 'tpu', 'gpu' or 'all'"):
        jaxmem.fetch_compilers("v5e-1")  # pyrefly: ignore[bad-argument-type]
    none_here.write_text("a file")
    with pytest.raises(ValueError, match="that is no folder"):
        jaxmem.find_chip("v5e-1")
    none_here.unlink()
    monkeypatch.setattr(compilers.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1e6))
    with pytest.raises(OSError, match=r"0.0 GB are free there, and 1.4 are needed. Nothing is left half there"):
        jaxmem.fetch_compilers("tpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    with pytest.raises(RuntimeError, match=r"JAX .* writes no programs that another process can read"):
        jaxmem.fetch_compilers("tpu")


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ("ERROR: [Errno 28] No space left on device", OSError, "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", RuntimeError, "it is damaged, or its index has another"),
        ("Failed to establish a new connection: Temporary failure in name resolution", OSError, "cannot be reached"),
        ("Killed", OSError, "the installer failed: Killed"),
    ],
)
def test_a_part_appears_whole_or_not_at_all(none_here, monkeypatch, tmp_path, capsys, words, error, told):
    fake_installer(monkeypatch, tmp_path, f"(target / 'half').mkdir(); sys.exit({words!r})")
    with pytest.raises(error, match=told):
        jaxmem.fetch_compilers("tpu")
    folder = compilers._version_folder()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    (folder / ".jax-killed").mkdir()  # as a process leaves it that was killed
    (folder / ".jax-killed" / compilers._MARK).touch()
    (folder / ".not-ours").mkdir()

    fake_installer(monkeypatch, tmp_path, "(target / 'whole').mkdir()")
    assert jaxmem.fetch_compilers("tpu") == folder
    assert sorted(path.name for path in folder.iterdir()) == [".not-ours", "jax", "lock", "tpu"]
    assert {path.name for path in (folder / "tpu").iterdir()} == {"whole", compilers._MARK}
    assert re.search(r"the compiler for TPUs: +205 of 205 MB", capsys.readouterr().out)
    fake_installer(monkeypatch, tmp_path, "sys.exit('what is there is not fetched again')")
    jaxmem.fetch_compilers("tpu")
    (folder / ".not-ours").rmdir()
    assert command.main(["compilers", "--remove"]) == 0 and not folder.exists()
    assert capsys.readouterr().out.endswith(f"removed: {folder / 'jax'}, {folder / 'tpu'}\n")


def test_only_what_was_fetched_is_removed(none_here, monkeypatch, tmp_path, capsys):
    """Whatever the folder is called and holds: a checkout, an archive, a folder of the very name, a link elsewhere."""
    fake_installer(monkeypatch, tmp_path, "(target / 'whole').mkdir()")
    folder = jaxmem.fetch_compilers("tpu", progress=False)
    theirs = [none_here / "jax-llm-examples" / "x.py", none_here / "jax-0.9.0-cpython-311" / "jax" / "x.py"]
    theirs += [none_here / "jax-0.10.1.tar.gz", folder / "notes" / "x.md", tmp_path / "shared" / "jax" / "x.py"]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("theirs")
    (tmp_path / "shared" / "jax" / compilers._MARK).touch()  # fetched, but into another folder
    (none_here / "jax-shared").symlink_to(tmp_path / "shared")
    for told in (f"removed: {folder / 'jax'}, {folder / 'tpu'}\n", "removed: nothing. Nothing there bears the mark"):
        assert command.main(["compilers", "--remove", "--path", str(none_here)]) == 0
        assert told in capsys.readouterr().out
        assert all(file.read_text() == "theirs" for file in theirs)
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_two_processes_do_not_fetch_at_once(none_here, monkeypatch, tmp_path):
    folder = compilers._version_folder()
    hold = textwrap.dedent(f"""
        import pathlib, time
        from jaxmem.common.files import locked
        with locked(pathlib.Path({str(folder / "lock")!r}), ""):
            print("held", flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=r"is in use by process .*It fetches compilers"):
            jaxmem.fetch_compilers("tpu")
        other.kill()


@pytest.mark.tpu_compile
def test_the_child_sees_nothing_of_the_users(tmp_path, monkeypatch):
    """A broken JAX on the user's path, and settings for his own, change no answer."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('the user has another JAX')")
    plain = jaxmem.compile_report(product, SHAPE, chip="v5e-1", cache=False)
    for name, value in (("PYTHONPATH", str(tmp_path)), ("JAX_REMAT3", "1"), ("XLA_FLAGS", "--no_such_flag=1")):
        monkeypatch.setenv(name, value)
    here = jaxmem.compile_report(product, SHAPE, chip="v5e-1", cache=False)
    assert plain.compiler == "jax 0.10.1, libtpu 0.0.51, own folder" or jax.__version_info__ > (0, 10, 2)
    assert dataclasses.replace(here, compile_seconds=0) == dataclasses.replace(plain, compile_seconds=0)


@pytest.mark.tpu_compile
@pytest.mark.quick
def test_stored_answers_are_those_of_the_compiler_and_say_so(tmp_path, monkeypatch):
    """Asked at other versions of JAX, the same questions have the same answers (`tests/answer_keys.sh`)."""
    recorder = recording.Recorder(tmp_path / "both.json.xz", tmp_path / "asked.jsonl")
    answers.answer_from(recorder)
    try:
        wide = jax.ShapeDtypeStruct((384, 656), jnp.float32)
        asked = {shape.shape: jaxmem.compile_report(product, shape, chip="v5e-1") for shape in (SHAPE, wide)}
        seen = str(asked[SHAPE.shape].timeline)  # somebody looks at this one, and not at the other
        recorder.note_looks()
        recording.pack(tmp_path / "asked.jsonl", tmp_path / "both.json.xz", {})

        monkeypatch.setenv("JAXMEM_COMPILERS", str(tmp_path / "none"))
        monkeypatch.setattr(compilers, "_is_installed", lambda module: False)
        monkeypatch.setattr(notebook, "FOLDER", tmp_path)
        notebook.begin("both")
        stored = jaxmem.compile_report(product, SHAPE, chip="v5e-1")
        assert re.search(r"own folder: stored, of \d+ \w+ \d{4}$", stored.compiler)
        assert str(stored.timeline) == seen
        unseen = jaxmem.compile_report(product, wide, chip="v5e-1")
        assert unseen.timeline is None and unseen.peak_bytes == asked[wide.shape].peak_bytes
        same = dict(compile_seconds=0, compiler="", timeline=None)
        assert dataclasses.replace(stored, **same) == dataclasses.replace(asked[SHAPE.shape], **same)
        with pytest.raises(ImportError, match=r"fetch_compilers.*No answer to exactly this program is stored"):
            jaxmem.compile_report(lambda x: product(x) + x @ x.T, SHAPE, chip="v5e-1")
    finally:
        answers.answer_from(None)
