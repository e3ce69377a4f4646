"""One run on several hosts: JAX's multi-controller runtime, one process for each host, all with the same program.

Every process calls `initialize()` before it touches JAX, then the same `llamem.runs.train(...)` with a mesh of all
devices. A host that is gone ends the others within a minute: a collective breaks, or JAX's coordination service misses
heartbeats and ends the process. Here are the words for either case.
"""

import atexit
import contextlib
import functools
import hashlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxmem.common import checks
from llamem.train.data import BatchSource

HEARTBEAT_SECONDS = 20  # after as long a silence of a host JAX's runtime ends the others
GONE = (
    "lost a host of this run: it was killed, lost its network, or stopped at an error of its own, which then stands in "
    "its own output. Start all hosts again: the run goes on from its newest snapshot."
)
# JAX's runtime ends a process, and with it every thread: newer ones by an abort, that of 0.7 by an exit. What the
# process could not say any more, this child of it says, unless it was told that Python is past it. Ctrl-C is for its
# parent.
_LEFT = "left"
_CHILD = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.stdin.read() != "{_LEFT}": print(sys.argv[1], file=sys.stderr)
"""
_errors = itertools.count()  # a barrier's name serves once


class LostHost(ConnectionError):
    """A host of this run stopped, or does not answer."""


def initialize(*, timeout_seconds: int = 300) -> None:
    """Join the processes of this run, before JAX is used for anything else. Do nothing where there is one.

    `LLAMEM_COORDINATOR` is address and port, `10.0.0.1:8476`, at which process 0 of `LLAMEM_NUM_HOSTS` listens;
    `LLAMEM_HOST` is this process's number, from 0. The two numbers may come from SLURM or Open MPI instead. Without
    an address JAX finds out by itself what SLURM, Open MPI and TPU pods say (`jax.distributed.initialize`);
    `LLAMEM_CLUSTER=auto` says that it must find something.

    Raises, with a note of what to look at, JAX's ValueError where something is missing, and its RuntimeError after JAX
    was used or where not all processes have come within `timeout_seconds`.
    """
    environment = os.environ
    address = environment.get("LLAMEM_COORDINATOR")
    count = _number("LLAMEM_NUM_HOSTS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    host = _number("LLAMEM_HOST", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    is_pod = environment.get("LLAMEM_CLUSTER") == "auto" or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    is_alone = count == 1 or (count is None and address is None and "LLAMEM_HOST" not in environment)
    if is_alone and not is_pod:
        return
    given: dict[str, Any] = (
        {"coordinator_address": address, "num_processes": count, "process_id": host} if address else {}
    )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    advice = (
        f"llamem: process {host} of {count} on {socket.gethostname()}. All must meet within {timeout_seconds} s: each "
        f"is started, reaches {address or 'process 0'} (firewall, name, port in use), and has the same number of "
        "processes and a number of its own. Under SLURM start the program with srun; where no launcher says where "
        "process 0 is, set LLAMEM_COORDINATOR=address:port, LLAMEM_NUM_HOSTS and LLAMEM_HOST for all."
    )
    # Versions of JAX differ in whether they raise an error here or abort.
    with last_words(advice):
        try:
            jax.distributed.initialize(
                **given, initialization_timeout=timeout_seconds, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
            )
            jax.process_count()  # where processes find out what devices the others have
        except (RuntimeError, ValueError) as error:
            error.add_note(advice)
            raise


def _number(*variables: str) -> int | None:
    """Return what the first of these environment variables says that is there."""
    return next((int(os.environ[name]) for name in variables if name in os.environ), None)


@contextlib.contextmanager
def agreed(same: Mapping[str, Any]) -> Iterator[None]:
    """Check that hosts mean the same by what they do together, and explain where one of them is lost.

    `same`: what has to be equal, by name; the code of this package and of jaxmem, and the versions of what they stand
    on, come by themselves. Do nothing where there is one process. Raise ValueError on every host, before anything is
    computed, that names what differs; inside, LostHost where a host does not answer any more.
    """
    if jax.process_count() == 1:
        yield
        return
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    with losses_explained():
        for name, value in {"code of llamem and jaxmem": _code(), "versions": versions, **same}.items():
            digest = np.frombuffer(hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), np.uint8)
            if (np.asarray(multihost_utils.process_allgather(digest)) != digest).any():
                raise ValueError(
                    f"the hosts do not run the same: the {name} of some differ from those of "
                    f"host {jax.process_index()} ({socket.gethostname()}), which are {str(value)[:300]}. Start all of "
                    "them from one image or one shared folder, with the same arguments."
                )
        yield


def _code() -> str:
    """Return a name for the code of this package and of the instrument as it stands on this host."""
    digest = hashlib.blake2b(digest_size=8)
    for root in (Path(__file__).parents[1], Path(checks.__file__).parents[1]):
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """Raise LostHost where what all hosts do together breaks since a host is gone, or print the last words.

    An error that every host met is raised as it is: they all come to the meeting that follows it.
    """
    meet = checks.import_extra("orbax.checkpoint", "training on several hosts").multihost.get_barrier_sync_fn()
    with last_words(f"llamem: {GONE}"):
        try:
            yield
        except Exception as error:
            try:
                meet(key=f"llamem/after error {next(_errors)}", timeout_ms=1000 * HEARTBEAT_SECONDS)
            except Exception:
                atexit.register(_leave_at_once)  # JAX would wait for the host that is gone
                raise LostHost(GONE) from error
            raise


@contextlib.contextmanager
def last_words(words: str) -> Iterator[None]:
    """Within it, a process that ends without Python's say, aborted or killed, has its child print these words."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as child:
        try:
            yield
        finally:
            child.communicate(_LEFT)


def _leave_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError where this host does not see the folder that the first host made and holds."""
    for _ in range(20):
        if (folder / "run.lock").exists():
            return
        time.sleep(0.5)  # network file systems show what others wrote a little later
    raise FileNotFoundError(
        f"host {jax.process_index()} ({socket.gethostname()}) does not see {folder / 'run.lock'}, which host 0 holds: "
        "all hosts need the same folder, on a file system that they share (NFS, Lustre, a mounted bucket)."
    )


def place_batch(batches: BatchSource, step: int, where: NamedSharding | None) -> tuple[Any, ...]:
    """Return the batch of a step as it lies on a mesh; this process reads only the sequences of its own devices, once.

    `where` is None on one device: the batch is then as it was read.
    """
    if where is None:
        return tuple(batches.batch_at(step))

    @functools.cache
    def rows(start: int, stop: int, stride: int) -> tuple[Any, ...]:
        return tuple(batches.batch_at(step, slice(start, stop, stride)))

    def array(i: int, like: Any) -> Any:
        def part(index: Any) -> Any:
            return rows(*index[0].indices(batches.batch_size))[i]

        return jax.make_array_from_callback((batches.batch_size, *like.shape[1:]), where, part)

    return tuple(array(i, like) for i, like in enumerate(batches.batch_at(step, slice(0))))
