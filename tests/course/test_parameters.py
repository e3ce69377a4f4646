import pytest

from llamem.course.parameters import as_list, check_chips


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["t4", "l4"], ["t4", "l4"]),
        ('["t4", "l4"]', ["t4", "l4"]),
        ("[t4, l4]", ["t4", "l4"]),
        ("t4, l4", ["t4", "l4"]),
        ("v5e-1", ["v5e-1"]),
        ("[]", []),
        ("[2048, 32_768]", [2048, 32_768]),
        ("2048, 4096", [2048, 4096]),
        (4096, [4096]),
    ],
)
def test_a_list_is_read_however_it_is_given(given, read):
    assert as_list(given) == read


def test_a_chip_that_nobody_knows_is_refused_with_its_parameter_and_the_names_there_are():
    check_chips(small_chip="v5e-1", chips=["t4", "h100"])
    with pytest.raises(ValueError, match=r"(?s)^chips: no chip is called 'h1000'\. Known: .*v5e-1.*h100"):
        check_chips(small_chip="v5e-1", chips=["t4", "h1000"])
