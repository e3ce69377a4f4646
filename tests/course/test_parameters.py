import pytest

from llamem_course.parameters import check_parameters


def test_a_chip_that_nobody_knows_is_refused_with_its_parameter_and_the_names_there_are():
    check_parameters((True, "never told"), small_chip="v5e-1", chips=["t4", "h100"])
    with pytest.raises(ValueError, match=r"(?s)^chips: no chip is called 'h1000'\. Known: .*v5e-1.*h100"):
        check_parameters(small_chip="v5e-1", chips=["t4", "h1000"])


def test_a_broken_rule_is_told_before_a_chip():
    with pytest.raises(ValueError, match="depth: take 4, 8, 12"):
        check_parameters((True, "never told"), (False, "depth: take 4, 8, 12 ..."), chip="h1000")
