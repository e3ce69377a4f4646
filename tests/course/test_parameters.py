import pytest

from jaxmem import chip_called
from llamem_course.parameters import check_parameters, sizes_for


def test_a_chip_that_nobody_knows_is_refused_with_its_parameter_and_the_names_there_are():
    check_parameters((True, "never told"), small_chip="v5e-1", chips=["t4", "h100"])
    with pytest.raises(ValueError, match=r"(?s)^chips: no chip is called 'h1000'\. Known: .*v5e-1.*h100"):
        check_parameters(small_chip="v5e-1", chips=["t4", "h1000"])


def test_a_broken_rule_is_told_before_a_chip():
    with pytest.raises(ValueError, match="depth: take 4, 8, 12"):
        check_parameters((True, "never told"), (False, "depth: take 4, 8, 12 ..."), chip="h1000")


@pytest.mark.parametrize(("chip", "preset"), [("v5e-1", "small"), ("t4", "small"), ("h100", "llama3.2-1b")])
def test_a_device_gets_a_model_that_is_worth_it_and_what_is_wished_comes_first(chip, preset):
    suited, sizes = sizes_for(chip_called(chip), {"steps": 7, "seq_len": None})
    assert suited == preset and sizes["steps"] == 7 and sizes["seq_len"] >= 1024
