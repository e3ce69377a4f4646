"""An exercise as data, and the one check of them all.

How to write one. A notebook asks for a function. Make an `Exercise` of it, called `check_` and the function's name:

- `right`: the shortest right answer, by another way than the notebook's solution where there is one.
- `cases`: what the answer is asked, by words for it. Choose them so that each misconception differs in one of them.
- `misconceptions`: hints, each with the answers that have the misconception. Who gets the result that one of these
  gives is told its hint. So a hint is written once, as the mistake itself, and the mistake is its test.
- `demands`: what a result does not show, such as what is kept, or how often something is computed. A demand asserts it
  of an answer; with it stand answers that have right results and fail it, by words of what they are told.

Where an answer is no function of plain arrays, `ask` says how to get arrays out of it: a gradient, a loss under a
mean. `otherwise` leads on whoever is wrong in a way that nobody foresaw. tests/course/test_exercises.py gives each
check all of these answers. Write a hint so that it asks, and does not answer. Six wrong answers are the least.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Answer = Callable[..., Any]
Answers = Answer | Sequence[Answer]


def quickly(fn: Answer) -> Answer:
    """Jit what runs once: on a CPU with few of the compiler's optimisations, in half the time."""
    few = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn, compiler_options=few if jax.default_backend() == "cpu" else None)


def one_by_one(answers: Mapping[str, Answers]) -> Iterator[tuple[str, Answer]]:
    """Yield each wrong answer with its words."""
    for words, some in answers.items():
        yield from ((words, one) for one in ([some] if callable(some) else some))


@dataclasses.dataclass(frozen=True)
class Exercise:
    """Call it with an answer: it prints that the answer is right, or raises AssertionError with a hint.

    `told(got, expected, *case)` says in numbers how a wrong result is off. Results are the same within `rtol` of the
    largest number, or where `accepts(got, expected)` says so.
    """

    number: int
    right: Answer
    cases: Mapping[str, tuple[Any, ...]]
    praise: str | Callable[[Answer], str]
    misconceptions: Mapping[str, Answers]
    demands: Mapping[Callable[[Answer], object], Mapping[str, Answers]] = dataclasses.field(default_factory=dict)
    otherwise: str = ""
    ask: Callable[..., Any] = lambda answer, *case: answer(*case)
    told: Callable[..., str] = lambda got, expected, *case: ""
    rtol: float = 1e-5
    accepts: Callable[[Any, Any], bool] | None = None
    _known: dict[Any, Any] = dataclasses.field(default_factory=dict)  # results of answers that stand here, by case

    def __call__(self, answer: Answer) -> None:
        """Check an answer. One that raises NotImplementedError was not tried, which is no error: a notebook runs on."""
        try:
            praise = self._praise(answer)
        except NotImplementedError:
            print(f"Exercise {self.number}: not tried yet.")
        except AssertionError as hint:
            raise AssertionError(f"Exercise {self.number}: not yet. {hint}") from None
        except (TypeError, ValueError) as error:
            text = f"Exercise {self.number}: not yet. The check could not use your answer: {error}"
            raise AssertionError(text) from error
        else:
            print(f"Exercise {self.number}: correct. {praise}")

    def _praise(self, answer: Answer) -> str:
        for name, case in self.cases.items():
            got, expected = self.ask(answer, *case), self._result(self.right, name)
            if not (self.accepts or self._same)(got, expected):
                assert got is not None, f"{name}: yours returns None. {self.otherwise}"
                told, hint = self.told(got, expected, *case), self._hint(name, got)
                said = (f"{name}:", told, "" if hint in told else hint)
                raise AssertionError(" ".join(filter(None, said)))
        for demand in self.demands:
            demand(answer)
        return self.praise(answer) if callable(self.praise) else self.praise

    def _hint(self, name: str, got: Any) -> str:
        """Return the hint of the misconception that gives this result in this case, and is right in those before."""
        return next(
            (hint for hint, wrong in one_by_one(self.misconceptions) if self._gives(wrong, name, got)), self.otherwise
        )

    def _gives(self, wrong: Answer, name: str, got: Any) -> bool:
        accepts = self.accepts or self._same
        try:
            before = list(self.cases)[: list(self.cases).index(name)]
            return self._same(self._result(wrong, name), got) and all(
                accepts(self._result(wrong, earlier), self._result(self.right, earlier)) for earlier in before
            )
        except (AssertionError, TypeError, ValueError):
            return False

    def _result(self, one: Answer, name: str) -> Any:
        if (one, name) not in self._known:
            self._known[one, name] = self.ask(one, *self.cases[name])
        return self._known[one, name]

    def _same(self, got: Any, expected: Any) -> bool:
        """Whether two results have the same shapes, and the same numbers within `rtol` of the largest."""
        ours, theirs = ([np.asarray(leaf, float) for leaf in jax.tree.leaves(one)] for one in (got, expected))
        return [one.shape for one in ours] == [one.shape for one in theirs] and all(map(self._close, ours, theirs))

    def _close(self, got: np.ndarray, expected: np.ndarray) -> bool:
        largest = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
        return np.allclose(got, expected, rtol=0, atol=self.rtol * largest, equal_nan=True)
