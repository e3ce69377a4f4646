"""Snapshots: damage, divergence, other settings, two processes."""

import errno
import fcntl
import json
import random
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.common import files
from llamem.train.snapshots import Snapshots

MODEL, SETTINGS = {"model d_model": "16"}, {"steps": 4, "learning_rate": 0.1}


def state_of(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "wide": jnp.asarray(rng.standard_normal((37, 11)), jnp.float32),
            "half": jnp.asarray(rng.standard_normal(23), jnp.bfloat16),
        },
        "step": jnp.int32(7),
    }


def restore(folder, settings=SETTINGS, model=MODEL, **options):
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state_of())
    with Snapshots(folder, model, settings) as snapshots:
        step, state, _ = snapshots.restore(abstract, **options)
    assert step == 1
    return state


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def folder(tmp_path):
    with Snapshots(tmp_path, MODEL, SETTINGS) as snapshots:
        snapshots.save(1, state_of(), read=4)
    return tmp_path


def data_files(folder):
    files = sorted(path for path in (folder / "snapshots" / "1" / "state").rglob("*") if path.is_file())
    return sorted(files, key=lambda path: -path.stat().st_size if "d" in path.parent.parts[-1:] else 0)


def test_no_flipped_bit_is_restored_as_other_numbers(folder):
    """Each flip either hits bytes that nobody reads, or is found; where tensorstore finds nothing, our sums name it."""
    assert_same(restore(folder), state_of())
    rng = random.Random(0)
    largest, *others = data_files(folder)
    places = [(largest, rng.randrange(largest.stat().st_size)) for _ in range(8)]
    places += [(file, rng.randrange(file.stat().st_size)) for file in others]
    (description,) = (folder / "snapshots" / "1" / "identity").glob("metadata")
    places.append((description, description.read_bytes().index(b'"steps": 4') + 9))
    found = []
    for file, place in places:
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(3)
        file.write_bytes(damaged)
        try:
            assert_same(restore(folder), state_of())
        except ValueError as error:
            found.append(str(error))
            assert re.search(r"no snapshot in .*/snapshots can be read: 1: .*Delete that folder to begin", found[-1])
        file.write_bytes(whole)
    assert any("['params']['wide'] are not the numbers that were written" in words for words in found)
    assert len(found) >= 6 and "its description is not what was written" in found[-1], found


def test_an_error_of_the_moment_is_no_damage(folder, monkeypatch):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "_read", read)
        with pytest.raises(OSError, match="Input/output error"):
            restore(folder)
    assert_same(restore(folder), state_of())


def test_other_settings_are_named_and_refused_until_the_word_is_said(folder, capsys):
    with pytest.raises(ValueError, match=r"steps: snapshot 4, now 8\. .*on_change='continue'.*--on-change") as error:
        restore(folder, {**SETTINGS, "steps": 8})
    assert type(error.value) is ValueError, "a command prints the class's name, and it is to be one that people know"
    assert_same(restore(folder, {**SETTINGS, "steps": 8}, on_change="continue"), state_of())
    assert "the snapshot's: steps: snapshot 4, now 8." in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"model d_model: snapshot '16', now '32'; steps: .*Use the settings") as error:
        restore(folder, {**SETTINGS, "steps": 8}, {"model d_model": "32"}, on_change="continue")
    assert "continue" not in str(error.value), "another model cannot be continued"


def test_a_state_of_another_layout_is_refused_by_its_names_and_stays(folder):
    """As an older version of the package would have written it: it is no damage, and nothing is put aside."""
    params = state_of()["params"]
    state = {**state_of(), "params": {"matrix": {"wide": params["wide"]}, "half": params["half"]}}
    with Snapshots(folder, MODEL, SETTINGS) as snapshots:
        snapshots.save(2, state, read=8)
    with pytest.raises(ValueError, match="hold a training state of another layout") as error:
        restore(folder)
    assert "it lacks: ['params']['wide']; it holds" in str(error.value)
    assert "not known here: ['params']['matrix']['wide']. Go on with the version" in str(error.value)
    assert {path.name for path in (folder / "snapshots").iterdir()} >= {"1", "2"}


def test_what_is_not_finite_is_not_saved(folder):
    ruined = state_of()
    ruined["params"]["half"] = ruined["params"]["half"].at[3].set(jnp.inf)
    with Snapshots(folder, MODEL, SETTINGS) as snapshots:
        with pytest.raises(FloatingPointError, match=r"\['params'\]\['half'\] of step 2 hold NaN or infinity"):
            snapshots.save(2, ruined, read=8)
        assert snapshots.latest() == 1


def names(folder):
    return {path.name for path in (folder / "snapshots").iterdir() if path.is_dir()}


def test_what_led_to_no_finite_loss_is_set_aside_and_never_the_last_one_nor_another_process_s(folder):
    with Snapshots(folder, MODEL, SETTINGS) as snapshots:
        snapshots.distrust(1)  # another process's
        snapshots.save(2, state_of(), read=8)
        snapshots.distrust(1)
        snapshots.distrust(2)
        snapshots.distrust(2)
        assert names(folder) == {"1", "diverged-2"} and snapshots.latest() == 1
        snapshots.save(2, state_of(), read=8)
        snapshots.distrust(2)
        assert names(folder) == {"1", "diverged-2", "diverged-2-2"}
    with Snapshots(folder / "new", MODEL, SETTINGS) as snapshots:
        snapshots.save(3, state_of(), read=8)
        snapshots.distrust(3)  # the only one
        assert names(folder / "new") == {"3"} and snapshots.latest() == 3


def test_a_snapshot_damaged_twice_is_set_aside_twice(folder):
    for aside in ({"damaged-2"}, {"damaged-2", "damaged-2-2"}):
        with Snapshots(folder, MODEL, SETTINGS) as snapshots:
            snapshots.save(2, state_of(), read=8)
        for file in (folder / "snapshots" / "2" / "state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        with pytest.warns(UserWarning, match="snapshots/2 is damaged"):
            assert_same(restore(folder), state_of())
        assert names(folder) == {"1", *aside}


def test_a_snapshot_under_another_step_s_name_is_noticed(folder):
    with Snapshots(folder, MODEL, SETTINGS) as snapshots:
        snapshots.save(6, state_of(seed=1), read=24)
    (folder / "snapshots" / "6").rename(folder / "snapshots" / "8")
    with pytest.warns(UserWarning, match=r"snapshots/8 is damaged \(it is that of step 6, under another name"):
        assert_same(restore(folder), state_of())
    assert names(folder) == {"1", "damaged-8"}


def in_the_way(place):
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file of somebody")


@pytest.mark.parametrize(
    ("where", "put", "error", "says"),
    [
        ("run", in_the_way, FileExistsError, "the folder of this run cannot be written into .*/run: .*File exists"),
        ("", in_the_way, NotADirectoryError, "the folder of this run cannot be written into .*Not a directory"),
        ("run/run.lock", lambda p: p.mkdir(parents=True), IsADirectoryError, "the folder of this run cannot be .*Is a"),
        ("run/metrics.jsonl", lambda p: p.mkdir(parents=True), IsADirectoryError, "a row of the metrics cannot be"),
    ],
)
def test_what_is_in_the_way_is_said_in_a_sentence_and_stays(where, put, error, says, tmp_path):
    place = tmp_path / "folder" / where
    put(place)
    told = r".*GB are free there\. What was written before stays: .*; or choose another output folder"
    snapshots = Snapshots(tmp_path / "folder" / "run", MODEL, SETTINGS)
    with pytest.raises(error, match=says + told) as raised, snapshots:
        snapshots.append_metrics({"step": 1, "loss": 1.0})
    assert raised.value.__suppress_context__ and place.exists()


FULL = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from test_snapshots import MODEL, SETTINGS, Snapshots, state_of
with Snapshots(sys.argv[1], MODEL, SETTINGS) as snapshots:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))  # every file is full after 64 bytes
    for write in (lambda: snapshots.save(2, state_of(), read=8), lambda: snapshots.append_metrics({"loss": "1" * 99})):
        try:
            write()
        except OSError as error:
            assert error.__suppress_context__
            print(error)
"""


def test_a_full_disk_is_said_in_a_sentence_and_costs_no_snapshot(folder):
    command = [sys.executable, "-c", FULL, str(folder), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"^the snapshot of step 2 cannot be written into .*make room", done.stdout, re.MULTILINE), done
    assert re.search(r"^a row of the metrics cannot be written into .*File too large", done.stdout, re.MULTILINE), done
    assert_same(restore(folder), state_of())


HOLD = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("_files", sys.argv[1])
files = importlib.util.module_from_spec(spec); spec.loader.exec_module(files)
with files.locked(files.Path(sys.argv[2]) / "run.lock", "why"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_killed_one_lets_go(folder):
    command = [sys.executable, "-c", HOLD, files.__file__, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match=rf"{folder} is in use by process {process.pid} on .*mix their metrics"):
        restore(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_same(restore(folder), state_of())


def test_a_file_system_without_locks_is_told_and_used(folder, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks .*see to it that no other process uses this folder"):
        assert_same(restore(folder), state_of())


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0\0\0"])
def test_a_torn_last_line_of_metrics_is_left_out(tmp_path, torn):
    metrics = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2)]
    with Snapshots(tmp_path, MODEL, SETTINGS) as snapshots:
        metrics.write_bytes(b"\n".join([*rows, torn]))
        assert [row["step"] for row in snapshots.cut_metrics(up_to=3)] == [1, 2]
        assert metrics.read_bytes() == b"\n".join(rows) + b"\n"
        snapshots.append_metrics({"step": 4, "loss": 1.0})  # the machine went down, and row 3 was not yet on disk
        assert [row["step"] for row in snapshots.cut_metrics(up_to=3)] == [1, 2]


@pytest.mark.parametrize(
    "odd",
    [
        b'{"step": 3, "lo',
        b"\xff\xfe\0",
        b"[1, 2]",
        b'{"x": 1}',
        b'{"step": "3", "loss": 1.0}',
        b'{"step": 3, "loss": null}',
        b"[" * 100_000,
    ],
    ids=["torn", "binary", "list", "stranger", "text", "null", "deep"],
)
def test_an_odd_row_of_metrics_costs_no_later_row_and_is_kept_beside(odd, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in (1, 2, 4, 5)]
    before = b"".join([*rows[:2], odd + b"\n", *rows[2:]])
    for name in ("metrics-as-it-was.jsonl", "metrics-as-it-was-2.jsonl"):
        metrics.write_bytes(before)
        with Snapshots(tmp_path, MODEL, SETTINGS) as snapshots:
            with pytest.warns(UserWarning, match=rf"{metrics}, line 3: no row of a step.* is kept as {name}"):
                assert [row["step"] for row in snapshots.cut_metrics(up_to=4)] == [1, 2, 4]
            assert snapshots.cut_metrics(up_to=3)  # nothing odd is left in it
        assert (tmp_path / name).read_bytes() == before and metrics.read_bytes() == b"".join(rows[:2])
