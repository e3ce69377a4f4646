"""Checks of notebook 03's exercises: slopes, lines and groups."""

from collections.abc import Callable

from llamem.course.exercises import grade


def check_residual_bytes(fn: Callable[[int, int, int, int], int]) -> None:
    """Exercise 1: what scan + remat keeps."""

    def body() -> str:
        found = fn(3, 5, 7, 2)
        if found == 5 * 7 * 2:
            raise AssertionError("That is one layer's input. Each of the layers leaves one.")
        if found != 3 * 5 * 7 * 2:
            raise AssertionError(f"For 3 layers, 5 tokens, width 7, 2 bytes: 210, not {found}. One x per layer.")
        return "One residual stream per layer, nothing else."

    grade(1, body)


def check_peak_at(fn: Callable[[int, dict[int, int]], float]) -> None:
    """Exercise 2: a line through two compiled peaks."""

    def body() -> str:
        for known in ({8: 100, 16: 180}, {16: 180, 8: 100}):
            found = fn(32, known)
            if found == 400:
                raise AssertionError("Not in proportion: at depth 0 the line is not at 0. What does one layer add?")
            if abs(found - 340) > 1e-9:
                raise AssertionError(f"Peaks {known}: one layer adds 10, so 32 layers need 340, not {found}.")
        return "Two small compilations stand for any depth."

    grade(2, body)


def check_best_groups(fn: Callable[[int], int]) -> None:
    """Exercise 3: groups of a nested scan."""

    def body() -> str:
        for n_layers in (1, 7, 12, 16, 32, 80):
            found = fn(n_layers)
            if not found or n_layers % found:
                raise AssertionError(f"{found} does not divide {n_layers}: all groups need the same number of layers.")
            least = min(g + n_layers // g for g in range(1, n_layers + 1) if n_layers % g == 0)
            if found + n_layers // found != least:
                raise AssertionError(
                    f"{n_layers} layers in {found} groups keep {found + n_layers // found}; {least} is possible."
                )
        return "Near the square root, as Chen et al. found in 2016."

    grade(3, body)
