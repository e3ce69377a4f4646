"""One run on several hosts: JAX's multi-controller runtime, one process for each host, all with the same program.

Every process calls `initialize()` before it touches JAX, then the same `llamem.train.train(...)` with a mesh of all
devices. Whatever started the processes tells them where they meet: SLURM, Open MPI, a TPU pod, or three addresses.
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from llamem.train.batches import BatchSource
from llamem.train.lost_hosts import HEARTBEAT_SECONDS, last_words, losses_explained

VARIABLES = ("LLAMEM_COORDINATOR", "LLAMEM_NUM_HOSTS", "LLAMEM_HOST")
# Where a launcher leaves how many processes there are and which this is.
LAUNCHERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


def initialize(
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host: int | None = None,
    *,
    timeout_seconds: int = 300,
) -> None:
    """Join the processes of this run, before JAX is used for anything else. Do nothing where there is one.

    `coordinator`: address and port, `"10.0.0.1:8476"`, at which process 0 of `num_hosts` listens; `host` is this
    process's number, from 0. What is not given is read from `LLAMEM_COORDINATOR`, `LLAMEM_NUM_HOSTS` and `LLAMEM_HOST`.
    Without any of them JAX finds out by itself what SLURM, Open MPI and TPU pods say (`jax.distributed.initialize`);
    `LLAMEM_CLUSTER=auto` says that it must find something.

    Raises ValueError that names what is missing or contradictory, RuntimeError after JAX was used, and TimeoutError
    where not all processes have come within `timeout_seconds`.
    """
    addresses = _addresses(coordinator, num_hosts, host)
    if addresses is None and not _launched_for_several():
        return
    waits = {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    place = "" if addresses is None else f" at {addresses['coordinator_address']}"
    me = "" if addresses is None else f"host {addresses['process_id']} of {addresses['num_processes']}, "
    nobody_came = (
        f"{me}{socket.gethostname()}: not all hosts met{place} within {timeout_seconds} s. Either one has not been "
        "started, cannot reach that address (a firewall, a name it does not know, a port in use), or was told another "
        "number of hosts. Start all of them again within that time, or give timeout_seconds."
    )
    try:
        # Versions of JAX differ in whether they raise an error here or abort.
        with last_words(f"llamem: {nobody_came}"):
            jax.distributed.initialize(**(addresses or {}), **waits)
            count = jax.process_count()
    except RuntimeError as error:
        if any(words in str(error) for words in ("must be called before", "only be called once")):
            raise RuntimeError(
                "initialize() comes too late: JAX was used, or initialised, in this process already. Call it first, "
                "once, before any array and any jax.devices()."
            ) from None
        raise TimeoutError(f"{nobody_came} JAX says: {str(error)[:600]}") from error
    if addresses is not None and count != addresses["num_processes"]:
        raise ValueError(
            f"{me}{socket.gethostname()}: wrong world size. This host was told that there are "
            f"{addresses['num_processes']}, and host 0 waited for {count}: start all with the same number."
        )


def _addresses(coordinator: str | None, num_hosts: int | None, host: int | None) -> dict[str, Any] | None:
    """Return what the caller or its environment says, whole; None where neither says anything."""
    given = dict(zip(VARIABLES, (coordinator, num_hosts, host), strict=True))
    said = {name: os.environ.get(name) if value is None else value for name, value in given.items()}
    if said["LLAMEM_COORDINATOR"] is not None:
        # A launcher that leaves no address still knows the numbers.
        for size, rank in LAUNCHERS.values():
            for name, variable in (("LLAMEM_NUM_HOSTS", size), ("LLAMEM_HOST", rank)):
                said[name] = os.environ.get(variable) if said[name] is None else said[name]
    missing = [name for name, value in said.items() if value in (None, "")]
    if len(missing) == len(said):
        return None
    if missing:
        raise ValueError(
            f"initialize: {', '.join(missing)} missing, of {', '.join(f'{n}={v!r}' for n, v in said.items())}. Every "
            "process needs all three: the address of process 0 (host:port, the same for all), the number of "
            "processes, and its own number from 0. Give the others too, or none of them under SLURM and on TPU pods."
        )
    address, *numbers = said.values()
    if not str(address).rpartition(":")[2].isdigit() or ":" not in str(address):
        raise ValueError(f"LLAMEM_COORDINATOR={address!r}: expected address and port, such as '10.0.0.1:8476'.")
    try:
        count, mine = (int(str(number)) for number in numbers)
    except ValueError:
        raise ValueError(f"initialize: expected whole numbers in {VARIABLES[1:]}, found {numbers}.") from None
    if not 0 <= mine < count:
        raise ValueError(
            f"LLAMEM_HOST={mine} of LLAMEM_NUM_HOSTS={count}: hosts are numbered from 0 to {count - 1}. Either this "
            "process has a wrong number, or the processes were told different world sizes."
        )
    if count == 1:
        return None
    return {"coordinator_address": str(address), "num_processes": count, "process_id": mine}


def _launched_for_several() -> bool:
    """Return whether a launcher started several processes. Raise ValueError where it left out what JAX needs."""
    environment = os.environ
    if environment.get("LLAMEM_CLUSTER") == "auto" or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    for launcher, (size, _) in LAUNCHERS.items():
        needed = {
            "SLURM": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"),
            "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri"),
        }[launcher]
        if int(environment.get(size, "1")) > 1:
            if missing := [name for name in needed if name not in environment]:
                raise ValueError(
                    f"{launcher} announces {size}={environment[size]} processes, but left out {', '.join(missing)}. "
                    "Under SLURM start the program with srun; with Open MPI 5, which no longer says where process 0 "
                    "is, set LLAMEM_COORDINATOR=address:port for all processes."
                )
            return True
    return False


@contextlib.contextmanager
def agreed(same: Mapping[str, Any]) -> Iterator[None]:
    """Check that hosts mean the same by what they do together, and explain where one of them is lost.

    `same`: what has to be equal, by name; the version of this package's code and of JAX come by themselves. Do nothing
    where there is one process. Raise ValueError on every host, before anything is computed, that names what differs;
    inside, LostHost where a host does not answer any more.
    """
    if jax.process_count() == 1:
        yield
        return
    with losses_explained():
        for name, value in {"code of llamem": _code(), "versions": _versions(), **same}.items():
            digest = np.frombuffer(hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), np.uint8)
            if (np.asarray(multihost_utils.process_allgather(digest)) != digest).any():
                raise ValueError(
                    f"the hosts do not run the same: the {name} of some differ from those of "
                    f"host {jax.process_index()} ({socket.gethostname()}), which are {str(value)[:300]}. All hosts "
                    "need the same code, versions, configuration, settings, text and plan: start them from one image "
                    "or one shared folder, with the same arguments."
                )
        yield


def _code() -> str:
    """Return a name for this package's code as it stands on this host."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError where this host does not see the folder that the first host made and holds."""
    holder = ""
    for _ in range(20):
        with contextlib.suppress(OSError):
            holder = (folder / "run.lock").read_text()
        if holder:
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
    read: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    def rows(index: Any) -> tuple[Any, ...]:
        mine = index[0].indices(batches.batch_size)
        if mine not in read:
            read[mine] = tuple(batches.batch_at(step, slice(*mine)))
        return read[mine]

    def array(i: int, like: Any) -> Any:
        shape = (batches.batch_size, *like.shape[1:])
        return jax.make_array_from_callback(shape, where, lambda index: rows(index)[i])

    return tuple(array(i, like) for i, like in enumerate(batches.batch_at(step, slice(0))))
