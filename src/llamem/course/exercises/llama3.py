"""Checks of notebook 06's exercises: parameters, caches and top-p."""

from collections.abc import Callable, Sequence

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig


def check_count_parameters(fn: Callable[..., int]) -> None:
    """Exercise 1: against the configurations' own counts."""

    def body() -> str:
        for name in ("llama3-8b", "qwen3-0.6b"):
            c = LlamaConfig.from_name(name, qk_norm=False, tied_head=False)
            found = fn(c.d_model, c.vocab_size, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff)
            missing = c.n_params - found
            if missing == c.vocab_size * c.d_model:
                raise AssertionError("One table too few: untied, embedding and head are two of them.")
            if missing in (c.d_model, 2 * c.d_model * c.n_layers, (2 * c.n_layers + 1) * c.d_model):
                raise AssertionError("Norms have a scale each: two in every layer, and one after the last.")
            if missing and c.n_heads * c.head_dim != c.d_model:
                raise AssertionError(f"{name} has heads of size {c.head_dim}: not D / H. Where does h belong?")
            if missing:
                raise AssertionError(f"{name}: {found:,}, not {c.n_params:,}. Which matrix is missing or double?")
        return "To the last parameter."

    grade(1, body)


def check_sequences_that_fit(fn: Callable[..., int]) -> None:
    """Exercise 2: whole caches in the bytes that are left."""

    def body() -> str:
        one = 2 * 7 * 11 * 3 * 5 * 2
        for free, expected in ((one * 4, 4), (one * 5 - 1, 4), (one - 1, 0)):
            found = fn(free, 11, 7, 3, 5, 2)
            if found == free // (one // 2) != expected:
                raise AssertionError("Twice too many: a cache holds keys and values.")
            if found != expected:
                raise AssertionError(f"{found} in {free} bytes: what does one cache hold, and can half of one serve?")
        return "Now you can size a server."

    grade(2, body)


def check_nucleus(fn: Callable[[Sequence[float], float], Sequence[int]]) -> None:
    """Exercise 3: what top-p leaves."""

    def body() -> str:
        probabilities = [0.1, 0.3, 0.05, 0.45, 0.1]
        for p, expected in ((0.4, [3]), (0.7, [1, 3]), (0.74, [1, 3]), (1e-9, [3])):
            found = list(fn(probabilities, p))
            if found != expected and sorted(found) == expected:
                raise AssertionError(f"The right indices, in the order {found}: put the smallest first.")
            if len(found) < len(expected):
                raise AssertionError(f"For p={p} of {probabilities}: {found} do not reach {p} together.")
            if found != expected:
                raise AssertionError(f"For p={p} of {probabilities}: {expected} suffice, not {found}.")
        return "Holtzman et al. called it nucleus sampling."

    grade(3, body)
