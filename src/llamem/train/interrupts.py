"""Ctrl-C and SIGTERM, noted between two steps: on several hosts by all of them between the same two."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[int], bool]]:
    """Yield `stop(done)`, to be asked after each step, `done` of them: whether to end here.

    An exception in the middle of a step would lose the state, whose buffers the step was given; so the first Ctrl-C or
    SIGTERM (a cloud takes its machine back) is only noted. A second one acts as usual. Of several hosts any may be told
    to stop: they agree on the step after which all do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda done: False
    elif jax.process_count() > 1:
        # JAX's runtime listens for SIGTERM itself, and tells the other hosts.
        with _noting([signal.SIGINT], lambda: os.kill(os.getpid(), signal.SIGTERM)):
            yield multihost_utils.reached_preemption_sync_point
    else:
        noted = threading.Event()
        with _noting([signal.SIGINT, signal.SIGTERM], noted.set):
            yield lambda done: noted.is_set()


@contextlib.contextmanager
def _noting(signals: list[signal.Signals], note: Callable[[], None]) -> Iterator[None]:
    def once(*_: Any) -> None:
        restore()
        note()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that was not set from Python

    before = {number: signal.signal(number, once) for number in signals}
    try:
        yield
    finally:
        restore()
