"""A host that is gone: all others end within a minute, with a sentence that says how to go on.

JAX's runtime finds it out: a collective breaks, or its coordination service misses heartbeats and aborts the process.
Here are only the words for either case.
"""

import atexit
import contextlib
import faulthandler
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

# JAX's runtime aborts a process, and with it every thread. What the process could not say any more, this child of it
# says. It reads what `faulthandler` writes at an abort; a kill writes nothing.
_errors = itertools.count()  # a barrier's name serves once
AFTERWARDS = "import sys; 'Abort' in sys.stdin.read() and print(sys.argv[1], file=sys.stderr)"


class LostHost(ConnectionError):
    """A host of this run stopped, or does not answer."""


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """Raise LostHost where what all hosts do together breaks since a host is gone, or print the last words.

    An error that every host met is raised as it is: they all come to the meeting that follows it.
    """
    meet = import_extra("orbax.checkpoint", "training on several hosts").multihost.get_barrier_sync_fn()
    with printed_after_an_abort(f"llamem: {GONE}"):
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
def printed_after_an_abort(words: str) -> Iterator[None]:
    """Within it, a process that is aborted has its child print these words to standard error."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", AFTERWARDS, words], stdin=subprocess.PIPE)
    assert child.stdin is not None
    before = faulthandler.is_enabled()
    faulthandler.enable(child.stdin, all_threads=False)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            faulthandler.enable(sys.__stderr__ or sys.stderr)
        child.communicate()


def _leave_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
