"""A host that is gone: all others end within a minute, with a sentence that says how to go on.

JAX's runtime finds it out: a collective breaks, or its coordination service misses heartbeats and ends the process.
Here are only the words for either case.
"""

import atexit
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

from llamem._extras import import_extra

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


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """Raise LostHost where what all hosts do together breaks since a host is gone, or print the last words.

    An error that every host met is raised as it is: they all come to the meeting that follows it.
    """
    meet = import_extra("orbax.checkpoint", "training on several hosts").multihost.get_barrier_sync_fn()
    with last_words(f"llamem: {GONE}"):
        try:
            yield
        except Exception as error:
            # Errors of this host's disk are its own; FileNotFoundError may be Orbax's, of another host's files.
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
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
