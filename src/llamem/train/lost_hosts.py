"""A host that is gone: found out within seconds, and said in a sentence, on every other host."""

import contextlib
import itertools
import os
import re
import sys
import threading
from typing import Any

from llamem._extras import import_extra

ROUND_SECONDS = 2  # hosts meet this often
SILENCE_SECONDS = 20  # and wait so long for each other
GRACE_SECONDS = 10  # for the main thread to leave by an exception


class LostHost(ConnectionError):
    """A host of this run stopped, or does not answer."""


class Watch:
    """While open, a thread meets those of all other hosts every few seconds, at a barrier of JAX's coordination service.

    When one does not come, the thread knows who: where the main thread has an exception in its hands, most often that
    of a broken collective, leaving the block raises LostHost from it; where it hangs in a collective, as it may on an
    accelerator, the thread prints the same words and ends the process. Nobody waits for the dead.

    `names`: what to call the hosts, in their order; before they are known it may hold any number of names.
    """

    _runs = itertools.count()

    def __init__(self, names: list[str]):
        self.names = names
        barrier = import_extra("orbax.checkpoint", "training on several hosts").multihost.get_barrier_sync_fn()
        self._meet, self._run = barrier, next(self._runs)
        self._over, self._found, self._told = threading.Event(), threading.Event(), threading.Event()
        self._words = ""
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watches for lost hosts")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            # All end together: else the first to leave would be taken for lost.
            with contextlib.suppress(RuntimeError):
                self._meet(key=f"llamem/{self._run}/end", timeout_ms=1000 * SILENCE_SECONDS)
        elif isinstance(error, RuntimeError) and self._found.wait(SILENCE_SECONDS + 2 * ROUND_SECONDS):
            self._told.set()
            raise LostHost(self._words) from error
        self._over.set()
        self._thread.join(2 * ROUND_SECONDS)

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
            print(f"llamem: {self._words}", file=sys.stderr, flush=True)
            os._exit(1)

    def _say(self, said: str) -> str:
        """The sentence, out of what the coordination service says of who did not come."""
        numbers = sorted({int(number) for number in re.findall(r"task:(\d+)", said)})
        lost = [self.names[n] if n < len(self.names) else f"host {n}" for n in numbers] or ["host 0, where all meet,"]
        return (
            f"lost {', '.join(lost[:4])}{f' and {len(lost) - 4} more' if len(lost) > 4 else ''}: no answer for "
            f"{SILENCE_SECONDS} s. It was killed, lost its network, or stopped at an error of its own, which then stands "
            "in its own output. Start all hosts again: the run goes on from its newest snapshot."
        )
