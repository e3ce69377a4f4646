"""One host of a test's run: `python host_run.py '{"host": 0, "hosts": 2, "port": 23456, "folder": "..."}'`.

What goes wrong on purpose is said there too. The last line printed is JSON: the run's losses, and the rows read.
"""

import dataclasses
import fcntl
import json
import os
import resource
import signal
import sys
import time

import jax

asked = json.loads(sys.argv[1])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", asked.get("devices", 1))

from llamem.train import hosts


def refused(*args):
    raise OSError(37, "No locks available")


if asked.get("no_locks"):
    fcntl.flock = refused
if "other_code" in asked:
    hosts._code = lambda: asked["other_code"]
time.sleep(asked.get("late", 0))
os.environ["LLAMEM_COORDINATOR"] = f"{asked.get('address', '127.0.0.1')}:{asked['port']}"
os.environ["LLAMEM_NUM_HOSTS"], os.environ["LLAMEM_HOST"] = str(asked["hosts"]), str(asked["host"])
hosts.initialize(timeout_seconds=asked.get("timeout", 120))

from test_loop import CONFIG, SETTINGS, corpus, losses

import llamem
from llamem.runs.loop import train
from llamem.train.data import Batches
from llamem.train.snapshots import Snapshots

rows_read = []
batch_at, append = Batches.batch_at, Snapshots.append_metrics


def recorded(self, step, rows=slice(None)):
    numbers = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
    if len(self.tokens) == 3500:  # the training text
        rows_read.extend((step, number) for number in numbers)
    return batch_at(self, step, rows)


def appended(self, row):
    append(self, row)
    if row["step"] == asked.get("stop_at"):
        os.kill(os.getpid(), signal.SIGTERM)
    if row["step"] == asked.get("full_at"):  # from now on every write to a file fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    time.sleep(asked.get("slow", 0))


Batches.batch_at, Snapshots.append_metrics = recorded, appended
settings = dataclasses.replace(SETTINGS, **asked.get("settings", {}))
plan = llamem.Plan(mesh=asked.get("mesh", {"fsdp": jax.device_count()}))
run = train(CONFIG, corpus(), settings, asked["folder"], plan=plan, progress=False)
print(json.dumps({"losses": losses(run.metrics), "rows": rows_read, "finished": run.finished}), flush=True)
