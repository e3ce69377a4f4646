"""Answers that were kept are those of exactly the program that asks: numbers by arithmetic, names by the program."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jaxmem
from jaxmem import __main__ as command
from jaxmem import answers, compiling
from jaxmem.chips import compilers
from llamem_course import notebook, recording, stored_answers

F32, BF16 = jnp.float32, jnp.bfloat16
X, W = jax.ShapeDtypeStruct((24, 40), F32), jax.ShapeDtypeStruct((6, 40, 40), F32)
needs_tpu_compiler = pytest.mark.skipif(not jaxmem.available("v5e-1"), reason="needs libtpu")

PROGRAM = """
def step(w, x):
    def layer(x, w):
        with jax.named_scope("{scope}"):
            {name} = jnp.tanh(x @ w)
        return {name} * 2, jnp.max({name})

    def loss(w):
        y, largest = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False, policy=None), x, w, unroll=1)
        return jnp.sum(y**2) + jnp.sum(largest)

    return w - jax.grad(loss)(w)
"""


def program(*changes: tuple[str, str], lines_above=0, file="program.py", scope="layer", name="h"):
    """The step above with text replaced, as it stands in a file."""
    text = PROGRAM.format(scope=scope, name=name)
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    namespace: dict = {"jax": jax, "jnp": jnp}
    exec(compile("\n" * lines_above + text, file, "exec"), namespace)
    return namespace["step"]


class Asked(answers.Source):
    """Answers nothing, and keeps what it is asked."""

    def __init__(self):
        self.questions = []

    def answer(self, question):
        self.questions.append(question)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(compiling, "find_compilers", lambda platform: None)
    source = Asked()
    answers.answer_from(source)
    yield source
    answers.answer_from(None)


def question(asked: Asked, fn, *args, chip="v5e-1", **options) -> answers.Question:
    with pytest.raises(ImportError, match="No answer to exactly this program is stored"):
        jaxmem.compile_report(fn, *(args or (W, X)), chip=chip, **options)
    return asked.questions[-1]


CHANGES = [
    ("return w - jax", "return 1 + w - jax"),
    ("return w - jax", "return jnp.sort(w) - jax"),
    ("return w - jax", "return jax.lax.optimization_barrier(w) - jax"),
    ("return w - jax", "return w - 2 * jax"),
    ("jnp.tanh", "jnp.sin"),
    ("x @ w)", "w.T @ x.T).T"),
    ("x @ w)", "jnp.matmul(x, w, precision='highest'))"),
    ("* 2,", "* 3,"),
    ("* 2,", "+ 2,"),
    ("jnp.max(", "jnp.min("),
    ("y**2", "y**3"),
    ("jnp.sum(y", "jnp.mean(y"),
    ("unroll=1", "unroll=2"),
    ("unroll=1", "unroll=1, reverse=True"),
    ("prevent_cse=False", "prevent_cse=True"),
    ("policy=None", "policy=jax.checkpoint_policies.everything_saveable"),
    ("jnp.tanh(x @ w)", "jnp.tanh((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))"),
    ("y**2", "jnp.outer(y.ravel(), y.ravel())"),
    ("return w - jax", "return jnp.flip(w, 0) - jax"),
    ("return w - jax", "return w + jnp.arange(40.0) - jax"),
    ("return w - jax", "return w + jnp.arange(40.0)[::-1] - jax"),
]


@pytest.mark.quick
def test_a_program_that_differs_in_a_single_operation_is_another_question(asked):
    keys = {question(asked, program()).key}
    for number, change in enumerate(CHANGES, 2):
        keys.add(question(asked, program(change)).key)
        assert len(keys) == number, change
    for options in (
        {"donate_argnums": (0,)},
        {"donate_argnums": (1,)},
        {"depth": "code"},
        {"chip": "v6e-1"},
        {"chip": "h100"},
    ):
        before = len(keys)
        keys.add(question(asked, program(), **options).key)
        assert len(keys) == before + 1, options
    for other in (jax.ShapeDtypeStruct((6, 40, 40), BF16), jax.ShapeDtypeStruct((7, 40, 40), F32)):
        before = len(keys)
        keys.add(question(asked, program(), other, jax.ShapeDtypeStruct(X.shape, other.dtype)).key)
        assert len(keys) == before + 1, other


@pytest.mark.quick
def test_the_same_program_elsewhere_is_the_same_question(asked):
    own = question(asked, program())
    moved = question(asked, program(lines_above=9, file="/tmp/ipykernel_7/99.py", name="other_name"))
    assert (moved.key, moved.names) == (own.key, own.names)
    moves = {f"program.py:{number}": f"cell:{number + 9}" for number in range(20)}
    of_step = own.lines[: (*own.lines, "").index("", 1)]  # then come functions of JAX's own, which it traces once
    assert moved.lines[: len(of_step)] == tuple(moves.get(line, line) for line in of_step) != of_step
    renamed = question(asked, program(scope="block"))
    assert renamed.key == own.key and renamed.names != own.names and renamed.lines == own.lines

    def jitted(name):
        def inner(x):
            return jnp.sin(x)

        inner.__name__ = name
        return lambda w, x: jax.jit(inner)(x)

    assert question(asked, jitted("one")).key == question(asked, jitted("another")).key


def test_shardings_and_the_host_are_part_of_the_question(asked):
    mesh = jaxmem.chip_called("v5e-4").mesh(a=2, b=2)
    keys = set()
    for spec in ((), ("a",), ("b",), (None, "a"), (("a", "b"),)):
        there = jax.ShapeDtypeStruct((8, 16), F32, sharding=jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        keys.add(question(asked, lambda x: jnp.sin(x), there, chip="v5e-4").key)
    assert len(keys) == 5
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def fetch(x):
        return jnp.sin(jax.device_put(x, jax.memory.Space.Device))

    keys = {question(asked, fetch, jax.ShapeDtypeStruct((8, 16), F32, sharding=place)).key for place in (None, host)}
    assert len(keys) == 2


KERNEL = """
def kernel(x_ref, o_ref):
    o_ref[...] = {body}

def step(w, x):
    return pl.pallas_call(kernel, out_shape=x, grid=({grid},), in_specs=[{block}], out_specs={block})(x)
"""
BLOCK = "pl.BlockSpec((8, 128), lambda i: (i, 0))"


def test_kernels_are_known_by_what_they_compute(asked):
    def keyed(body="x_ref[...] * 2", grid=2, block=BLOCK, lines_above=0):
        namespace: dict = {"jax": jax, "jnp": jnp, "pl": pl}
        exec(compile("\n" * lines_above + KERNEL.format(body=body, grid=grid, block=block), "k.py", "exec"), namespace)
        return question(asked, namespace["step"], W, jax.ShapeDtypeStruct((16, 128), F32)).key

    own = keyed()
    assert keyed(lines_above=5) == own
    others = [
        keyed(body="x_ref[...] * 3"),
        keyed(grid=1),
        keyed(block=BLOCK.replace("(i, 0)", "(1 - i, 0)")),
        keyed(block=BLOCK.replace("(8,", "(16,")),
    ]
    assert len({own, *others}) == 5


ANSWER = {f"{name}_bytes": 0 for name in ("argument", "output", "alias", "host", "constant")}
ANSWER |= {"collectives": [], "compiled_matmul_flops": None, "compile_seconds": 0.0}


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Stands for a compiler: the programs that reached it."""
    calls = []
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "cache"))
    there = compilers.Compilers("a compiler")
    monkeypatch.setattr(compiling, "find_compilers", lambda platform: there)
    monkeypatch.setattr("jaxmem.chips.names.find_compilers", lambda platform: there)

    def compile_absent(request):
        calls.append(request)
        span = ["dot.1", 64, 0, 1, "device", 0, 0, "f32[4,4]", "workspace", "", "dot_general", "program.py:5", None]
        schedule = {"assigned_bytes": 64, "steps": 2, "passes": [], "loops": [], "operations": ["a", "b"]}
        row = {"shape": "f32[4,4]", "bytes": 64, "operation": "dot_general", "source": "program.py:5"}
        told = {"buffers": [row], "schedule": schedule | {"buffers": [span]}, "temp_bytes": len(calls)}
        return json.loads(json.dumps(ANSWER | told))

    monkeypatch.setattr(compiling, "compile_absent", compile_absent)
    yield calls
    answers.answer_from(None)


def report(fn, **options):
    return jaxmem.compile_report(fn, W, X, chip="v5e-1", **options)


def test_a_kept_answer_has_the_lines_of_the_program_at_hand(compiled):
    own, moved = report(program()), report(program(lines_above=9))
    assert len(compiled) == 1 and own.peak_bytes == moved.peak_bytes
    assert own.timeline is not None and moved.timeline is not None
    assert own.buffers[0].source == own.timeline.buffers[0].source == "program.py:5"
    assert moved.buffers[0].source == moved.timeline.buffers[0].source == "program.py:14"
    report(program(scope="block"))  # whose arrays have other names
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", '{"answer": {}, "lines": []}', "\0", "cut", "changed", "no digest"]
)
def test_a_damaged_entry_is_no_answer(compiled, tmp_path, content):
    report(program())
    (file,) = (tmp_path / "cache" / "reports").iterdir()
    whole = file.read_text()
    told = {"cut": whole[:90], "changed": whole.replace('"temp_bytes": 1', '"temp_bytes": 7')}
    told["no digest"] = whole.partition("\n")[2]
    file.write_text(told.get(content, content))
    assert report(program()).temp_bytes == 2 and report(program()).temp_bytes == 2 and len(compiled) == 2


def test_the_cache_has_a_bound_and_the_oldest_go_first(compiled, tmp_path, monkeypatch):
    programs = [program(("* 2,", f"* {n},")) for n in range(3, 8)]
    report(programs[0])
    folder = tmp_path / "cache" / "reports"
    (first,) = folder.iterdir()
    strangers = [folder / "notes.txt", folder / "0123.json", folder / ("a" * 32 + ".json")]
    for stranger in strangers:
        stranger.write_text("not ours" * 1000)
    monkeypatch.setattr(answers, "_MOST_BYTES", int(3.5 * first.stat().st_size))
    for age, one in enumerate(programs[1:3]):
        report(one)
        os.utime(first, (age, age))
    for file in answers.kept_reports():
        os.utime(file, (10, 10))
    report(programs[0])  # read: the newest now
    report(programs[3])
    assert first.exists() and len(answers.kept_reports()) == 3
    assert all(stranger.exists() for stranger in strangers)


def test_processes_that_keep_the_cache_small_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(answers, "_MOST_BYTES", 1000)
    traced = jax.make_jaxpr(lambda x: x)(0)

    def keep(n):  # a warning that a report cannot be kept is an error here
        asked = answers.Question(jaxmem.CHIPS["v5e-1"], f"program {n}", "", (), traced, ())
        return answers.cached(asked, compilers.Compilers("none"), lambda: {"peak_bytes": n})

    with ThreadPoolExecutor(8) as pool:
        assert [answer["peak_bytes"] for answer in pool.map(keep, range(400))] == [*range(400)]
    assert 0 < sum(answers.kept_reports().values()) <= 1000


def test_the_command_tells_and_clears_the_cache(compiled, tmp_path, capsys):
    report(program())
    stranger = tmp_path / "cache" / "reports" / "mine.json"
    stranger.write_text("{}")
    assert command.main(["cache"]) == 0 and "1 report" in capsys.readouterr().out
    assert command.main(["cache", "--clear"]) == 0 and "1 report" in capsys.readouterr().out
    assert [*stranger.parent.iterdir()] == [stranger]


def test_the_old_names_of_variables_are_read(tmp_path, monkeypatch):
    for kind in ("CACHE", "COMPILERS"):
        monkeypatch.delenv(f"JAXMEM_{kind}", raising=False)
        monkeypatch.setenv(f"LLAMEM_{kind}", str(tmp_path / "old"))
    assert compilers.cache_folder("reports") == tmp_path / "old" / "reports"
    assert compilers.compilers_folder() == tmp_path / "old"
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "new"))
    monkeypatch.setenv("JAXMEM_COMPILERS", str(tmp_path / "new"))
    assert compilers.cache_folder("reports") == tmp_path / "new" / "reports"
    assert compilers.compilers_folder() == tmp_path / "new"


@pytest.fixture
def stored(compiled, tmp_path, monkeypatch):
    """A file of answers to three questions, the second with a timeline that somebody looked at, and no compiler."""
    file = tmp_path / "some_notebook.json.xz"
    recorder = recording.Recorder(file, tmp_path / "asked.jsonl")
    answers.answer_from(recorder)
    report(program())
    str(report(program(("* 2,", "* 3,"))).timeline)
    str(report(program()))
    report(program(), donate_argnums=(0,))
    recorder.note_looks()
    assert "3 answers" in recording.pack(tmp_path / "asked.jsonl", file, {"depth": 8})
    monkeypatch.setattr(compiling, "find_compilers", lambda platform: None)
    monkeypatch.setattr("jaxmem.chips.names.find_compilers", lambda platform: None)
    monkeypatch.setattr(notebook, "FOLDER", tmp_path)
    monkeypatch.setattr(notebook, "find_compilers", lambda platform: None)
    return file


def test_stored_answers_say_so_and_answer_nothing_else(stored):
    notebook.begin("some_notebook")
    source = answers.source()
    assert isinstance(source, stored_answers.StoredAnswers) and source.parameters == {"depth": 8}
    first, second = report(program()), report(program(("* 2,", "* 3,"), lines_above=4))
    assert (first.temp_bytes, second.temp_bytes) == (1, 2) and first.compiler == f"a compiler: stored, of {source.day}"
    assert f"stored with the course on {source.day}" in source.taken() and not source.taken()
    assert first.timeline is None and "has no schedule" in first.no_timeline
    assert second.timeline is not None and second.timeline.buffers[0].source == "program.py:9"
    other_names = report(program(scope="block"))
    assert other_names.temp_bytes == 1 and not other_names.buffers and "other names" in other_names.no_timeline
    for change in CHANGES[:3]:
        with pytest.raises(ImportError, match="No answer to exactly this program is stored"):
            report(program(change))
    notebook.begin("another_notebook")
    with pytest.raises(ImportError, match="fetch_compilers"):
        jaxmem.find_chip("v5e-1")


def test_keys_of_another_version_are_those_of_the_same_questions(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_VERSION", "0.99")
    real = answers.question

    def another_version(chip, lowered, *rest):  # the same questions, in another text
        return real(chip, dataclasses.replace(lowered, arithmetic=f"99 {lowered.arithmetic}"), *rest)

    monkeypatch.setattr(compiling.answers, "question", another_version)
    recorder = recording.Recorder(stored, tmp_path / "again.jsonl")
    answers.answer_from(recorder)
    asked = [program(), program(("* 2,", "* 3,")), program()]
    assert [report(fn).temp_bytes for fn in asked] == [1, 2, 1]
    assert report(program(), donate_argnums=(0,)).temp_bytes == 3
    before = stored.stat().st_size
    assert "3 keys for JAX 0.99 added, 0 answers without one" in recording.add_keys(tmp_path / "again.jsonl", stored)
    assert stored.stat().st_size < 2 * before
    for version in (another_version, real):
        monkeypatch.setattr(compiling.answers, "question", version)
        answers.answer_from(stored_answers.StoredAnswers(stored))
        assert [report(fn).temp_bytes for fn in asked] == [1, 2, 1]
    # A question that is alike, asked once more or once less: nobody knows which is which.
    answers.answer_from(recording.Recorder(stored, tmp_path / "less.jsonl"))
    report(program())
    assert "0 keys for JAX 0.99 added" in recording.add_keys(tmp_path / "less.jsonl", stored)


def test_stored_answers_need_neither_compilers_nor_fcntl(stored, tmp_path):
    code = f"""
        import sys
        sys.modules["fcntl"] = None  # as on Windows
        import pathlib
        import jaxmem
        from jaxmem import answers, common, compiling
        from jaxmem.chips import compilers
        from jaxmem.common.files import locked, write_whole, whole_folder
        compilers._is_installed = lambda module: False
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from llamem_course.stored_answers import StoredAnswers
        answers.answer_from(StoredAnswers(pathlib.Path({str(stored)!r})))
        from test_answers import W, X, program
        print(jaxmem.compile_report(program(), W, X, chip="v5e-1").temp_bytes)
        folder = pathlib.Path({str(tmp_path)!r})
        with locked(folder / "held" / "lock", "why"), whole_folder(folder / "made") as made:
            (made / "file").write_text("whole")
        print((folder / "made" / "file").read_text())
    """
    environment = {**os.environ, "JAXMEM_COMPILERS": str(tmp_path / "none"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1", "whole"], done.stderr


def test_eight_threads_ask_at_once(compiled):
    """Each has its own answer and its own warnings, and what is global in JAX is as it was."""

    def globally():
        return jax.devices, jax.local_devices, jax.default_backend, jax.config.values["jax_enable_compilation_cache"]

    before = globally()

    def asking(x):
        return x @ x.T * len(jax.devices())

    def silent(x):
        return x @ x.T

    def ask(number):
        fn, chip = (asking, silent)[number % 2], ("v5e-1", "local")[number // 2 % 2]
        x = jax.ShapeDtypeStruct((8 + number, 16), F32)
        found = jaxmem.compile_report(fn, x, chip=chip, cache=False)
        told = any("asks which device it runs on" in warning for warning in found.warnings)
        return chip == "v5e-1" or found.argument_bytes == 4 * 16 * (8 + number), told == (number % 4 == 0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(ask, range(24))] == [(True, True)] * 24
    finally:
        sys.setswitchinterval(interval)
    assert before == globally()


LABELS = """
def f({arguments}):
    def loss(w):
        hidden = jnp.tanh(x @ w["a"])
        with jax.named_scope("{scope}"):
            out = hidden @ w["b"]
        return jnp.sum(out**2)

    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))
"""


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_names_and_categories_are_those_of_the_program_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    weights = {"a": jax.ShapeDtypeStruct((640, 384), F32), "b": jax.ShapeDtypeStruct((384, 16_640), F32)}
    x = jax.ShapeDtypeStruct((2048, 640), F32)

    def asked(file, scope, lines_above, **options):
        namespace: dict = {"jax": jax, "jnp": jnp}
        text = "\n" * lines_above + LABELS.format(arguments="w, x", scope=scope)
        exec(compile(text, file, "exec"), namespace)
        found = jaxmem.compile_report(namespace["f"], weights, x, chip="v5e-1", **options)
        return dataclasses.replace(found, compile_seconds=0.0)

    first = asked("a.py", "logits", 0)
    for program_at_hand in (("a.py", "logits", 3), ("b.py", "image_decoder", 5), ("a.py", "logits", 0)):
        assert asked(*program_at_hand) == asked(*program_at_hand, cache=False)
    assert first.timeline is not None
    assert any(span.category == "logits" and span.source == "a.py:6" for span in first.timeline.buffers)
