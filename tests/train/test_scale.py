"""The templates under scale/: in valid shell and YAML, and asking for what `scale/train.py` understands."""

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

import llamem
import llamem.train
from llamem.files import smollm2_file
from llamem.planner import command
from llamem.text import Tokenizer

SCALE = Path(__file__).resolve().parents[2] / "scale"


@pytest.mark.parametrize("path", sorted(SCALE.glob("*.sh")), ids=lambda path: path.name)
def test_shell_is_valid(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o111, f"{path.name} cannot be executed"
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


def test_the_jobset_is_one_and_its_numbers_agree():
    jobset = yaml.safe_load((SCALE / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (jobs,) = jobset["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    (container,) = job["template"]["spec"]["containers"]
    said = {entry["name"]: entry for entry in container["env"]}
    assert str(job["parallelism"]) == str(job["completions"]) == said["LLAMEM_NUM_HOSTS"]["value"]
    # JobSet's names: set, group, job, pod, in the service that is called as the set.
    address, port = said["LLAMEM_COORDINATOR"]["value"].split(":")
    assert address == f"{jobset['metadata']['name']}-{jobs['name']}-0-0.{jobset['metadata']['name']}"
    assert container["ports"] == [{"containerPort": int(port)}]
    assert "job-completion-index" in said["LLAMEM_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"] * job["parallelism"]
    assert container["command"][container["command"].index("--mesh") + 1] == f"fsdp={gpus}"


def test_the_slurm_template_asks_for_a_process_for_each_device():
    text = (SCALE / "slurm.sh").read_text()
    size = {
        name: int(value) for name, value in re.findall(r"#SBATCH --(nodes|ntasks-per-node|gpus-per-node)=(\d+)", text)
    }
    assert size["ntasks-per-node"] == size["gpus-per-node"]
    assert f"--mesh fsdp={size['nodes'] * size['gpus-per-node']} " in text


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_vms.sh", "node.sh", "jobset.yaml"])
def test_templates_call_what_train_understands(name, monkeypatch):
    text = (SCALE / name).read_text()
    if name.endswith(".yaml"):
        (jobs,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
        (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
        words = container["command"][container["command"].index("scale/train.py") + 1 :]
    else:
        words = re.findall(r"[^\s\\\"']+", re.findall(r"scale/train.py((?:.*\\\n)*.*)", text)[-1])
    parsed = []

    class Parsed(Exception):
        pass

    def parse(self, given=None):
        parsed.append(real(self, words))
        raise Parsed

    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(Parsed):
        runpy.run_path(str(SCALE / "train.py"), run_name="__main__")
    given = parsed[0]
    config = llamem.LlamaConfig.from_name(given.preset)
    mesh = {axis: int(size) for axis, size in (part.split("=") for part in given.mesh.split(","))}
    settings = llamem.TrainSettings(batch_size=given.batch_size, seq_len=given.seq_len)
    llamem.abstract_step(config, settings, llamem.Plan(mesh=mesh))  # refuses what does not divide
    assert given.report and given.steps == 10_000


@pytest.mark.parametrize(
    ("asked", "said", "wanted"),
    [
        (
            ["llama3.1-8b", "--chip", "v5e-8", "--batch", "8"],
            ["--steps", "7"],
            {"batch_size": 8, "seq_len": 4096, "steps": 7},
        ),
        (
            ["llama3.2-1b", "--chip", "v5e-1", "--clip", "layer"],
            ["--seq-len", "512"],
            {"clip": "layer", "seq_len": 512},
        ),
        (
            ["llama3.1-8b", "--chip", "t4", "--lora", "16", "8", "--batch", "2", "--quantize", "q4_0"],
            ["--init", "a model", "--chats", "mine.jsonl"],
            {"batch_size": 2},
        ),
    ],
    ids=["a mesh", "one chip", "adapters over four bits"],
)
def test_a_run_takes_all_of_a_plan_s_file_and_what_is_said_beside_it(asked, said, wanted, tmp_path, monkeypatch):
    file, done, loaded = tmp_path / "plan.json", [], []
    assert command.main(["plan", *asked, "--tokens", "4096", "--estimate", "--save", str(file)]) == command.FITS
    monkeypatch.setattr(llamem.runs, "train", lambda *given, **how: done.append((*given, how)) or runs)
    monkeypatch.setattr(llamem, "load_pretrained", lambda folder, **how: loaded.append(how) or model)
    monkeypatch.setattr(llamem.train, "load_chats", lambda *given: "chats")
    monkeypatch.setattr(llamem.train, "load_corpus", lambda *given: "text")
    monkeypatch.setattr(sys, "argv", ["train.py", "--plan", str(file), "--output", "run", *said])
    runs, model = types.SimpleNamespace(finished=True), types.SimpleNamespace(config="the model's")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCALE / "train.py"), run_name="__main__")
    ((config, _, settings, _, how),) = done
    assert how["plan"] == llamem.Plan.load(file) and how["plan"].changes
    assert {name: getattr(settings, name) for name in wanted} == wanted
    if "--lora" in asked:
        assert how["lora"] == llamem.LoraConfig(ranks=(16, 8)) and config == model.config
        types_ = {"dtype": jnp.float16, "compute_dtype": jnp.float16}
        assert loaded == [{**types_, "quantize": "q4_0", "plan": how["plan"]}]
    else:
        in_16_bits = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
        assert config == llamem.LlamaConfig.from_name(asked[0], **in_16_bits) and how["lora"] is None


@pytest.mark.parametrize(
    ("status", "restarts", "again"), [(0, 0, False), (2, 0, False), (137, 0, True), (75, 19, True), (1, 20, False)]
)
def test_a_job_that_ends_too_early_starts_itself_again(tmp_path, status, restarts, again):
    """With programs of ours in the places of SLURM's: what a scheduler makes of it a weekly test sees."""
    for name, does in (("srun", f"exit {status}"), ("scontrol", f'echo "$@" > {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    said = {"RUN": str(tmp_path), "SLURM_SUBMIT_DIR": str(SCALE.parent), "SLURM_JOB_ID": "7"}
    where = {**os.environ, **said, "SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCALE / "slurm.sh")], env=where, check=False)
    assert done.returncode == status
    requeued = tmp_path / "requeued"
    assert requeued.exists() == again and (not again or requeued.read_text() == "requeue 7\n")


# In the place of scale/train.py: told to stop it goes on talking while it saves, and to be told twice ends it.
HOST = """
import os, signal, sys, time
host, status = int(os.environ["LLAMEM_HOST"]), None
def stop(*_):
    global status
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 75
signal.signal(signal.SIGTERM, stop)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1 + host]))
print("started", flush=True)
while status is None:
    time.sleep(0.01)
for row in range(30):
    print("saving", flush=True)
    time.sleep(0.05)
print("saved", flush=True)
sys.exit(status)
"""


def start_hosts(tmp_path, count, *words):
    (tmp_path / "train.py").write_text(HOST)
    shutil.copy(SCALE / "local.sh", tmp_path)
    command = ["bash", str(tmp_path / "local.sh"), str(count), *map(str, words)]
    where = {**os.environ, "PYTHON": sys.executable}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=where, start_new_session=True, **pipes)


@pytest.mark.parametrize(
    ("statuses", "ends"), [((0, 0), 0), ((0, 75), 75), ((75, 1), 1), ((1, 2), 2), ((2, 75), 2), ((75,), 75)]
)
def test_hosts_on_one_machine_end_with_what_a_scheduler_wants_to_know(statuses, ends, tmp_path):
    process = start_hosts(tmp_path, len(statuses), *statuses)
    process.communicate(timeout=60)
    assert process.returncode == ends


@pytest.mark.parametrize("told", ["the group", "the script"])
def test_one_sigterm_saves_on_all_hosts_whoever_is_told(told, tmp_path):
    """As `timeout` and supervisors send it, or `kill`; each host is told once."""
    process = start_hosts(tmp_path, 2)
    assert process.stdout is not None
    started = [process.stdout.readline() for _ in range(2)]
    assert sorted(started) == ["[host 0] started\n", "[host 1] started\n"]
    (os.killpg if told == "the group" else os.kill)(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and {"[host 0] saved", "[host 1] saved"} <= set(said.splitlines()), said


@pytest.mark.weekly
@pytest.mark.slow
def test_one_node_of_eight_devices_is_one_process_that_stops_and_goes_on(tmp_path):
    words = ["--preset", "tiny", "--dtype", "float32", "--batch-size", "8", "--seq-len", "64", "--eval-every", "0"]
    words += ["--snapshot-every", "1", "--warmup-steps", "1", "--report"]
    where = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHON": sys.executable}
    where |= {"RUN": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["bash", str(SCALE / "node.sh"), *words]
    process = subprocess.Popen([*command, "--steps", "500"], env=where, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while (not metrics.exists() or metrics.read_text().count("\n") < 2) and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75 and "Interrupted, and saved after step" in said, said
    done = metrics.read_text().count("\n")
    more = [*command, "--steps", str(done + 2), "--on-change", "continue"]
    run = subprocess.run(more, env=where, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "8 x cpu" in (tmp_path / "run.json").read_text() and (tmp_path / "report.ipynb").exists()


def test_what_is_refused_ends_with_a_status_of_its_own(tmp_path):
    command = [sys.executable, str(SCALE / "train.py"), "--output", str(tmp_path / "run"), "--seq-len", "70000"]
    where = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "longer than the model's max_seq_len" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "run").exists()


@pytest.mark.weekly
@pytest.mark.slow
def test_adapters_over_a_gguf_on_chats_from_the_command_line(tmp_path):
    chats = [{"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}."} for i in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    command = [sys.executable, SCALE / "train.py", "--output", tmp_path / "run", "--save", tmp_path / "saved"]
    command += ["--init", smollm2_file(), "--lora", "4", "--chats", tmp_path / "chats.jsonl", "--dtype", "float32"]
    command += ["--steps", "2", "--batch-size", "2", "--seq-len", "64", "--warmup-steps", "1", "--eval-every", "2"]
    here = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=here)
    assert not run.returncode, run.stderr
    again = llamem.load_pretrained(smollm2_file(), compute_dtype="float32")
    adapters = llamem.load_adapters(again, tmp_path / "saved")
    assert adapters.count == 1 and Tokenizer(tmp_path / "saved").chat_template
    assert "base_model: " in (tmp_path / "saved" / "README.md").read_text()
