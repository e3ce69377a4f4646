"""Wrong answers to exercises, by the mistake that they make: the check, the answer, a pattern of the hint."""

from collections.abc import Callable
from typing import Any

import pytest

Answers = dict[str, tuple[Callable[..., Any], Callable[..., Any], str]]


def refuse(case: tuple[Callable[..., Any], Callable[..., Any], str], *given_away: str) -> None:
    """The check refuses the answer with a hint that leads on, and that holds none of the words `given_away`."""
    check, answer, leads_to = case
    with pytest.raises(AssertionError, match=leads_to) as refused:
        check(answer)
    hint = str(refused.value)
    assert len(hint.split()) > 8, f"the hint says too little: {hint}"
    assert not any(words in hint for words in given_away), f"the hint is the answer: {hint}"
