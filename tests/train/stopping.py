"""A run that is stopped in the midst of it."""

import contextlib
import signal
import unittest.mock

from llamem.train.snapshots import Snapshots


def interrupt():
    """As by Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def stopped_after(step, stop=interrupt):
    """Runs within are stopped when the metrics of that step are written."""
    write = Snapshots.append_metrics

    def write_and_stop(self, row):
        write(self, row)
        if row["step"] == step:
            stop()

    with unittest.mock.patch.object(Snapshots, "append_metrics", write_and_stop):
        yield
