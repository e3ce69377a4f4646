"""Each exercise of each notebook has at least six wrong answers among the tests that see them rejected."""

from collections import Counter

import pytest
import test_exercises
import test_wrong_answers_13 as policy

ENOUGH = 6


def wrong_answers() -> Counter[str]:
    """How many wrong answers are tried on each check, by its name."""
    found: Counter[str] = Counter()
    for table in (policy.WRONG,):
        found.update(check.__name__ for check, _, _ in table.values())
    found.update({name.partition(".")[2]: test_exercises.ENOUGH for name in test_exercises.CHECKS})  # tested there
    return found


@pytest.mark.quick
def test_every_exercise_has_its_wrong_answers():
    found = wrong_answers()
    exercises = [one for path in test_exercises.NOTEBOOKS for one in test_exercises.exercises_of(path)]
    checks = {one.name: one.check.partition("(")[0].removeprefix("exercises.") for one in exercises}
    assert len(checks) > 20
    few = {name: found[check] for name, check in checks.items() if found[check] < ENOUGH}
    assert not few, f"too few wrong answers: {few}"
