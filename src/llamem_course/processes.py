"""Processes of this machine that play hosts: each runs the same program, and is told where they meet."""

import os
import socket
import subprocess
import sys

_FOR_ALL = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": "compiled",  # so that what is compiled once serves all runs
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def start(program: str, count: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start `count` processes that run a program: `program ADDRESS COUNT HOST arguments...`.

    Process 0 listens at ADDRESS, they are COUNT, and this one is number HOST of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # a port that nobody uses
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for host in range(count):
        command = [sys.executable, program, *map(str, (address, count, host, *arguments))]
        process = subprocess.Popen(
            command, env=os.environ | _FOR_ALL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
    return processes


def printed(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Return what each of them printed, once all have ended. Raise RuntimeError where one failed."""
    texts = []
    for process in processes:
        text, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors[-3000:])
        # Gloo carries the messages between CPUs, and reports when it has connected.
        lines = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
        texts.append("\n".join(lines))
    return texts
