"""The templates under scale/: in valid shell and YAML, and asking for what `scale/train.py` understands."""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import llamem
from llamem.files import smollm2_file
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


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_vms.sh", "jobset.yaml"])
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
