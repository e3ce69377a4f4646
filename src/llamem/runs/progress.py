"""What a person, or a program of theirs, sees of a run while it trains: a bar, lines of a log, each step's row."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.common.checks import import_extra

OnStep = Callable[[dict[str, Any]], None]
_SECONDS = 10  # at least so long between two lines of a log, but for what was evaluated, the first and the last


@contextlib.contextmanager
def showing(first: int, steps: int, progress: bool, on_step: OnStep | None) -> Iterator[OnStep]:
    """Yield `show(row)`, to be called with the row of each step after `first`; mute on other hosts than the first.

    With `progress` it moves a bar, or prints lines where nothing is redrawn: a file, a pipe, a scheduler's log. Then it
    calls `on_step(row)`.
    """
    if jax.process_index() != 0:
        yield lambda row: None
        return
    with contextlib.ExitStack() as shown:
        watchers = [] if on_step is None else [on_step]
        if progress:
            watchers.insert(0, _bar(first, steps, shown) if _is_redrawn() else _lines(steps))

        def show(row: dict[str, Any]) -> None:
            for watcher in watchers:
                watcher(row)

        yield show


def _is_redrawn() -> bool:
    shell = sys.modules.get("IPython")  # a notebook's output is no terminal, and is redrawn
    return sys.stdout.isatty() or (shell is not None and shell.get_ipython() is not None)


def _bar(first: int, steps: int, shown: contextlib.ExitStack) -> OnStep:
    tqdm = import_extra("tqdm", "the progress bar").tqdm  # not tqdm.auto: widgets do not survive on GitHub
    bar = shown.enter_context(tqdm(initial=first, total=steps, unit="step", file=sys.stdout, mininterval=1.0))

    def move(row: dict[str, Any]) -> None:
        bar.set_postfix_str(_words(row))
        bar.update()

    return move


def _lines(steps: int) -> OnStep:
    last = -float("inf")

    def line(row: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS or row["step"] == steps or "val_loss" in row:
            held_out = f", held out {row['val_loss']:.3f}" if "val_loss" in row else ""
            print(f"step {row['step']:,} of {steps:,}: {_words(row)}{held_out}", flush=True)
            last = time.monotonic()

    return line


def _words(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s, {row['memory_bytes'] / 2**30:.1f} GiB"
