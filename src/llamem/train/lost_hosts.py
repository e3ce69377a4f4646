"""A host that is gone: found out within seconds, and said in a sentence, on every other host."""

import atexit
import contextlib
import faulthandler
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from llamem._extras import import_extra

ROUND_SECONDS = 2  # hosts meet this often
SILENCE_SECONDS = 20  # and wait so long for each other
GRACE_SECONDS = 10  # for the main thread to leave by an exception
REMEDY = "Start all hosts again: the run goes on from its newest snapshot."

# JAX's runtime aborts a process whose coordination service is gone, and with it every thread. What the process could
# not say any more, this child of it says. It reads what `faulthandler` writes at an abort; a kill writes nothing.
AFTERWARDS = "import sys; 'Abort' in sys.stdin.read() and print(sys.argv[1], file=sys.stderr)"


class LostHost(ConnectionError):
    """A host of this run stopped, or does not answer."""


class Watch:
    """While open, a thread meets those of all other hosts every few seconds, at a barrier of JAX's coordination.

    When one does not come, the thread knows who. Where the main thread has an exception in its hands, most often that
    of a broken collective, leaving the block raises LostHost from it; where it hangs in a collective, as it may on an
    accelerator, the thread prints the same words and ends the process. Nobody waits for the dead.

    `names`: what to call the hosts, in their order; see `know`.
    """

    _runs = itertools.count()

    def __init__(self, names: list[str]):
        self.names = names
        self._meet = import_extra("orbax.checkpoint", "training on several hosts").multihost.get_barrier_sync_fn()
        self._run = next(self._runs)
        self._over, self._found, self._told = threading.Event(), threading.Event(), threading.Event()
        self._words = ""
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watches for lost hosts")
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def know(self, names: list[str]) -> None:
        """From now on the hosts have these names."""
        self.names = names
        if jax.process_index() > 0:
            words = f"llamem: lost {names[0]}, where all hosts meet: see what JAX's runtime says above. {REMEDY}"
            self._open.enter_context(said_after_an_abort(words))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            # All end together: else the first to leave would be taken for lost.
            self._all_come("end")
        # Errors of this host's disk are its own, and one that all hosts met is nobody's loss. What is left may be a
        # broken collective: a ValueError of Gloo's, a RuntimeError of JAX's, or what Orbax makes of them and of files
        # that another host should have written.
        elif (
            (not isinstance(error, OSError) or isinstance(error, FileNotFoundError))
            and not self._all_come("error")
            and self._found.wait(SILENCE_SECONDS + 2 * ROUND_SECONDS)
        ):
            self._told.set()
            atexit.register(_leave_at_once)  # JAX would wait for the dead at the end of this process
            raise LostHost(self._words) from error
        self._over.set()
        self._thread.join(2 * ROUND_SECONDS)
        self._open.close()

    def _all_come(self, where: str) -> bool:
        try:
            self._meet(key=f"llamem/{self._run}/{where}", timeout_ms=1000 * (SILENCE_SECONDS + ROUND_SECONDS))
        except RuntimeError:
            return False
        return True

    def _watch(self) -> None:
        for number in itertools.count():
            try:
                self._meet(key=f"llamem/{self._run}/{number}", timeout_ms=1000 * SILENCE_SECONDS)
            except RuntimeError as error:
                if not self._over.is_set():
                    self._lost(str(error))
                return
            if self._over.wait(ROUND_SECONDS):
                return

    def _lost(self, said: str) -> None:
        self._words = self._say(said)
        self._found.set()
        if not self._told.wait(GRACE_SECONDS) and not self._over.is_set():
            print(f"llamem: {self._words}", file=sys.stderr)
            _leave_at_once()

    def _say(self, said: str) -> str:
        """The sentence, out of what the coordination service says of who did not come."""
        # Who did not come in time, or sends no heartbeats any more: a line for each, "3" or
        # "/job:jax_worker/replica:0/task:3", up to an empty line or a sentence.
        found = re.search(r"(?:timed out task names|stopped sending heartbeats\)):\n((?:\S*\d+\n)+)", said)
        numbers = [int(number) for number in re.findall(r"(\d+)\n", found[1])] if found else []
        lost = [self.names[n] if n < len(self.names) else f"host {n}" for n in numbers]
        # Without a name it was the service itself that is gone, and host 0 with it.
        lost = lost or ["another host" if jax.process_index() == 0 else self.names[0]]
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        return (
            f"lost {', '.join(lost[:4])}{more}: no answer for {SILENCE_SECONDS} s. It was killed, lost its network, or "
            f"stopped at an error of its own, which then stands in its own output. {REMEDY}"
        )


@contextlib.contextmanager
def said_after_an_abort(words: str) -> Iterator[None]:
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
