"""Checks of the exercises of notebook 02."""

import itertools
from collections.abc import Callable
from typing import Any

from llamem.course.exercises import grade


def check_frontier(fn: Callable[..., Any]) -> None:
    """Exercise 1: the policies that no other policy beats."""

    def body() -> str:
        table = {"a": (10, 5.0), "b": (20, 4.0), "c": (20, 6.0), "d": (30, 4.0), "e": (40, 3.0), "f": (9, 9.0)}
        for rows in itertools.permutations(table.items(), 6):
            got = fn(dict(rows))
            assert got is not None, "Return the names, in any order."
            got = set(got)
            for loser, winner in (("c", "b"), ("d", "b")):
                assert loser not in got, (
                    f"{loser} = {table[loser]} does not belong: {winner} = {table[winner]} is nowhere worse and "
                    "somewhere better."
                )
            assert got == {"a", "b", "e", "f"}, f"Nothing beats all of a, b, e and f in both; yours: {sorted(got)}."
        return "Only these are worth a thought, whatever bytes and FLOPs are worth to you."

    grade(1, body)


def check_residual_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 2: what a policy keeps, by hand."""

    def body() -> str:
        from llamem.llama.config import LlamaConfig

        config = LlamaConfig.from_name("llama3-8b", compute_dtype="bfloat16")
        width = {"block_in": 4096, "q": 4096, "k": 1024, "v": 1024, "attn": 4096, "gate": 14_336, "up": 14_336}
        for names in ((), ("attn",), ("k", "v"), ("gate", "up", "q")):
            got, want = fn(config, 1000, names), 2 * 32 * 1000 * (4096 + sum(width[name] for name in names))
            assert got == want, (
                f"Keeping {names} for 1,000 tokens of Llama 3 8B: {want:,} bytes, not {got}. Each layer's input is "
                "kept besides the names; k and v have n_kv_heads heads."
            )
        return "Widths times tokens times layers: a policy can be priced before anything is compiled."

    grade(2, body)
