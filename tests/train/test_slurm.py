"""`scale/slurm.sh` under a real SLURM of two nodes on this machine: what ends too early starts itself again.

Needs root, and Debian's packages `slurm-wlm` and `munge`. Everything lives in a temporary folder, on free ports.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
pytestmark = [
    pytest.mark.weekly,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason="needs root and the packages slurm-wlm and munge"),
]
STEPS = 40
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=5
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName={host}x NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes={host},{host}x Default=YES State=UP OverSubscribe=FORCE:2 OverTimeLimit=0
"""


def wait_for(what: str, happens: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until, f"{what}: not within {seconds:.0f} seconds"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder with a cluster's files, while its daemons run; SLURM's own programs find it by SLURM_CONF.

    JAX asks where the processes meet by the first node's name, so that is the name of this machine.
    """
    (tmp_path / "state").mkdir()
    tmp_path.chmod(0o755)
    key = tmp_path / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    conf = tmp_path / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=tmp_path, ports=free_ports(3)))
    here = os.environ | {"SLURM_CONF": str(conf)}
    munge = [f"--{name}={tmp_path / file}" for name, file in (("socket", "munge.socket"), ("key-file", "munge.key"))]
    munge += [f"--{name}-file={tmp_path / name}" for name in ("log", "pid", "seed")]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in (host, f"{host}x")]
    daemons = []
    try:
        for command in commands:
            log = (tmp_path / f"{command[0]}{command[-1][-1]}.log").open("w")
            daemons.append(subprocess.Popen(command, env=here, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_for("munge", (tmp_path / "munge.socket").exists, 20)
        wait_for("two idle nodes", lambda: asked(conf, "sinfo", "-h", "-o", "%T %D") == "idle 2", 60)
        yield tmp_path
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=here, check=False, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
        for process in started_under(conf):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def started_under(conf: Path) -> list[int]:
    """Return the ids of the processes that carry this cluster's SLURM_CONF: its daemons, their steps, the run's."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if f"SLURM_CONF={conf}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def asked(conf: Path, *command: str) -> str:
    answer = subprocess.run(command, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, text=True)
    return answer.stdout.strip()


def submit(folder: Path, *changes: tuple[str, str]) -> str:
    """Send the template off, with the sizes of this machine and `changes`; return the job's number."""
    text = (ROOT / "scale" / "slurm.sh").read_text()
    sizes = [("--nodes=4", "--nodes=2"), ("--ntasks-per-node=8", "--ntasks-per-node=1"), ("=12", "=1")]
    sizes += [("#SBATCH --gpus-per-node=8\n", ""), (".venv/bin/python", sys.executable), ("=%x-%j.out", "=%x.out")]
    sizes += [("--preset llama3.1-8b --mesh fsdp=32", "--preset tiny --dtype float32 --mesh fsdp=2")]
    sizes += [("--batch-size 64 --seq-len 8192", "--batch-size 2 --seq-len 64"), (" --report\n", "\n")]
    sizes += [("--steps 10000 --warmup-steps 200", f"--steps {STEPS} --warmup-steps 2")]
    sizes += [("--eval-every 500 --snapshot-every 500", "--eval-every 0 --snapshot-every 5")]
    for old, new in (*sizes, *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / "slurm.sh"
    script.write_text(text)
    here = os.environ | {"RUN": str(folder / "run"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    here |= {"SLURM_CONF": str(folder / "slurm.conf")}
    sent = subprocess.run(
        ["sbatch", "--parsable", f"--chdir={folder}", str(script)], cwd=ROOT, env=here, capture_output=True, text=True
    )
    assert sent.returncode == 0, sent.stderr
    return sent.stdout.strip()


def state_of(folder: Path, job: str) -> dict[str, str]:
    shown = asked(folder / "slurm.conf", "scontrol", "show", "job", job)
    return dict(re.findall(r"(\w+)=(\S*)", shown))


def steps_done(folder: Path) -> list[int]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def to_the_end(folder: Path, job: str, steps: int = STEPS) -> None:
    """Wait until a run that was stopped has started again, and is whole, each step done once.

    SLURM lets two minutes pass before it starts a job again. We shorten them; a few seconds its nodes do need.
    """

    def ended() -> bool:
        state = state_of(folder, job)["JobState"]
        if state == "PENDING" and job not in brought_forward:
            asked(folder / "slurm.conf", "scontrol", "update", f"JobId={job}", "StartTime=now+15")
            brought_forward.add(job)
        elif state == "RUNNING":
            brought_forward.discard(job)
        return state in ("COMPLETED", "FAILED", "TIMEOUT")

    brought_forward: set[str] = set()
    wait_for("the end", ended, 900)
    state = state_of(folder, job)
    assert state["JobState"] == "COMPLETED" and int(state["Restarts"]) > 0, (state, output(folder)[-3000:])
    assert steps_done(folder) == list(range(1, steps + 1))


def output(folder: Path) -> str:
    """What the job printed; where two processes write at once, not always whole characters."""
    file = folder / "llamem.out"
    return file.read_text(errors="replace") if file.exists() else ""


def test_a_process_killed_on_a_healthy_node_goes_on_from_its_snapshot(cluster):
    job = submit(cluster)
    wait_for("twelve steps", lambda: len(steps_done(cluster)) >= 12, 240)
    processes = asked(cluster / "slurm.conf", "pgrep", "-f", f"^{sys.executable} -u scale/train.py.*{cluster}/run")
    os.kill(int(processes.splitlines()[-1]), signal.SIGKILL)
    to_the_end(cluster, job)


def test_a_run_longer_than_its_time_limit_saves_and_goes_on(cluster):
    """Two minutes, of which the last one is for saving; so many steps take longer."""
    limit = ("--time=24:00:00", "--time=2"), ("--signal=TERM@180", "--signal=TERM@60")
    job = submit(cluster, *limit, (f"--steps {STEPS}", "--steps 400"))
    to_the_end(cluster, job, steps=400)
    assert "Interrupted, and saved after step" in output(cluster)


def test_what_is_refused_is_not_started_again(cluster):
    job = submit(cluster, (f"--steps {STEPS}", "--steps -1"))
    wait_for("the end", lambda: state_of(cluster, job)["JobState"] == "FAILED", 120)
    state = state_of(cluster, job)
    assert state["Restarts"] == "0" and state["ExitCode"].startswith("2"), (state, output(cluster)[-2000:])
