"""Several processes on this machine, as hosts of one run: the same curve, and what happens when one is lost."""

import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import test_loop
from test_loop import losses, wait_for_rows

import jaxmem
from llamem.runs import train
from llamem.train import hosts
from llamem.train.hosts import GONE

HERE = Path(__file__).parent
SETTINGS = {"steps": 6, "eval_every": 3, "eval_batches": 9, "snapshot_every": 1}  # the last batch is not full
WHERE = {**os.environ, "PYTHONPATH": ":".join([str(HERE), str(HERE.parent), *sys.path]), "PYTHONUNBUFFERED": "1"}


class Cluster:
    """Processes of one run, in the order of their numbers."""

    def __init__(self, folder, count, *, each=None, **asked):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"folder": str(folder), "port": port, "hosts": count, "settings": SETTINGS, **asked}
        words = [json.dumps({**common, "host": i, **(each or {}).get(i, {})}) for i in range(count)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, str(HERE / "host_run.py")]
        self.processes = [subprocess.Popen([*command, own], env=WHERE, **pipes) for own in words]

    @functools.cached_property
    def ended(self):
        """What each said: standard output, standard error."""
        return [process.communicate(timeout=240) for process in self.processes]

    @property
    def answers(self):
        for process, (output, errors) in zip(self.processes, self.ended, strict=True):
            assert process.returncode == 0, output + errors[-3000:]
        return [json.loads(output.splitlines()[-1]) for output, _ in self.ended]

    def wait_for_rows(self, folder, count):
        wait_for_rows(self.processes[0], folder, count)
        assert all(process.poll() is None for process in self.processes), self.ended

    def kill(self, lost):
        """Kill one host; of the other, what it said, once it has ended: within a minute, and with the words."""
        self.processes[lost].kill()
        start = time.monotonic()
        output, errors = self.ended[1 - lost]
        assert time.monotonic() - start < 60 and self.processes[1 - lost].returncode != 0
        assert GONE in errors, output + errors


def assert_same_curve(ours, others, tolerance=1e-6):
    assert [row[0] for row in ours] == [row[0] for row in others]
    for (_, loss, val_loss, norm), (_, expected, expected_val, expected_norm) in zip(ours, others, strict=True):
        assert val_loss is None or val_loss == pytest.approx(expected_val, rel=tolerance)
        assert loss == pytest.approx(expected, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=10 * tolerance)  # a norm: sums of squares in another order


def alone_in(folder):
    """The losses of the run in this process, on one device, or of what is left of a run."""
    run = train(test_loop.CONFIG, test_loop.corpus(), replace(test_loop.SETTINGS, **SETTINGS), folder, progress=False)
    assert run.finished
    return [list(row) for row in losses(run.metrics)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return alone_in(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
def test_two_hosts_stop_together_and_one_goes_on_with_the_curve_of_one(alone, tmp_path):
    # Host 1 is told to stop; both do, after the same step. Their folder's file system has no locks.
    two = Cluster(tmp_path, 2, no_locks=True, slow=0.1, each={1: {"stop_at": 2}}).answers
    done = len(two[0]["losses"])
    assert not two[0]["finished"] and 2 <= done < 6 and two[0]["losses"] == two[1]["losses"]
    assert_same_curve(alone_in(tmp_path), alone)
    # Of every step each sequence was read by one host, in the order of one process. (Step 0 once more, for its shapes.)
    read = sorted(map(tuple, two[0]["rows"] + two[1]["rows"]))
    once = sorted(set(read))
    assert len(read) == len(once) + 4
    assert once == [(step, number) for step in range(done) for number in range(4 * step, 4 * step + 4)]
    assert {number % 4 for _, number in two[1]["rows"]} == {2, 3}


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "says"),
    [
        ({1: {"other_code": "0123"}}, "the code of llamem and jaxmem of some differ from those of host 0"),
        ({1: {"settings": {**SETTINGS, "learning_rate": 0.5}}}, "the settings of some differ from those of host 0"),
        ({1: {"full_at": 2}}, "lost a host of this run"),
        ({1: {"late": 30, "timeout": 15}, 0: {"timeout": 15}}, "All must meet within 15 s"),
        ({1: {"folder": "/nowhere"}}, "does not see /nowhere/run.lock"),
    ],
    ids=["code", "settings", "disk", "late", "folder"],
)
def test_what_goes_wrong_on_one_host_is_said_and_nobody_hangs(each, says, tmp_path):
    cluster = Cluster(tmp_path, 2, each=each)
    said = "\n".join(output + errors for output, errors in cluster.ended)
    assert all(process.returncode for process in cluster.processes)
    assert re.search(says, said), said


@pytest.mark.weekly
@pytest.mark.slow
def test_four_hosts_then_two_then_one(alone, tmp_path):
    # Slow steps: word of a signal takes a while to reach all hosts, and some step must be left for the last one.
    four = Cluster(tmp_path, 4, slow=0.5, each={2: {"stop_at": 1}}).answers
    two = Cluster(tmp_path, 2, slow=0.5, devices=2, each={1: {"stop_at": len(four[0]["losses"]) + 1}}).answers
    assert len(four[0]["losses"]) < len(two[0]["losses"]) < 6
    assert_same_curve(alone_in(tmp_path), alone)


@pytest.mark.weekly
@pytest.mark.slow
def test_ten_random_kills_lose_nothing(tmp_path):
    """Whichever host is killed, the other ends within a minute, and the run goes on bit by bit."""
    settings = {**SETTINGS, "steps": 40}
    whole = Cluster(tmp_path / "whole", 2, settings=settings).answers[0]
    random_, folder = random.Random(time.time_ns()), tmp_path / "killed"
    for kill in range(10):
        cluster = Cluster(folder, 2, slow=0.2, settings=settings)
        cluster.wait_for_rows(folder, 3 * kill + 2)
        time.sleep(random_.uniform(0, 0.5))
        cluster.kill(kill % 2)
    again = Cluster(folder, 2, settings=settings).answers[0]
    assert again["finished"] and again["losses"] == whole["losses"]


def test_a_host_with_another_instrument_has_other_code(monkeypatch, tmp_path):
    before = hosts._code()
    copy = shutil.copytree(Path(jaxmem.__file__).parent, tmp_path / "jaxmem")
    monkeypatch.setattr(hosts.checks, "__file__", str(copy / "common" / "checks.py"))
    assert hosts._code() == before
    (copy / "compiling.py").write_text("# another\n")
    assert hosts._code() != before


OURS = {"LLAMEM_COORDINATOR": "a:1", "LLAMEM_HOST": "1", "LLAMEM_NUM_HOSTS": "3"}


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ({}, None),
        ({**OURS, "LLAMEM_NUM_HOSTS": "1"}, None),
        (OURS, ("a:1", 3, 1)),
        ({"LLAMEM_COORDINATOR": "a:1", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, ("a:1", 3, 2)),
        ({"LLAMEM_COORDINATOR": "a:1"}, ("a:1", None, None)),  # JAX refuses what is not whole
        ({"LLAMEM_HOST": "1"}, ()),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, ()),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ()),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"LLAMEM_CLUSTER": "auto"}, ()),
    ],
)
def test_jax_is_told_what_the_environment_says_and_finds_the_rest_itself(monkeypatch, said, given):
    for name in list(os.environ):
        if name.startswith(("LLAMEM_", "SLURM_", "OMPI_", "TPU_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **words: calls.append(words))
    hosts.initialize()
    names = ("coordinator_address", "num_processes", "process_id")
    assert [tuple(call[name] for name in names if name in call) for call in calls] == ([] if given is None else [given])


def test_what_a_launcher_left_out_is_refused_by_jax_with_our_advice():
    code = "from llamem.train.hosts import initialize; initialize()"
    where = {**WHERE, "SLURM_NTASKS": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=False)
    assert done.returncode and "coordinator_address should be defined" in done.stderr
    assert "Under SLURM start the program with srun" in done.stderr


@pytest.mark.parametrize("end", ["os.abort()", "raise SystemExit(1)"])
def test_a_process_that_python_does_not_end_leaves_the_words(end):
    code = f"import os\nfrom llamem.train.hosts import GONE, last_words\nwith last_words(GONE):\n    {end}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and (GONE in done.stderr) == ("os." in end), done.stderr


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_hosts_that_share_no_loopback(tmp_path):
    """Gloo, too, must find the other host by its address, not by a name that means this machine."""
    script = [str(HERE / "hosts_in_namespaces.sh"), sys.executable, str(HERE / "host_run.py"), str(tmp_path)]
    done = subprocess.run(script, env=WHERE, capture_output=True, text=True, check=False, timeout=200)
    if done.returncode == 77:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    two = [json.loads((tmp_path / f"host{i}").read_text().splitlines()[-1]) for i in range(2)]
    (one,) = Cluster(tmp_path / "one", 1, mesh={}, settings={}).answers
    assert two[0]["losses"] == two[1]["losses"]
    assert_same_curve(two[0]["losses"], one["losses"])
