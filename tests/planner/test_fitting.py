"""`find_fitting`, `options` and `largest`: what is asked, what is returned, what is said where nothing fits.

The notebooks under docs/ ask real compilers.
"""

import pytest

import jaxmem
from jaxmem import NothingFits, find_fitting, fitting, largest, options

MiB = 2**20
V5E = jaxmem.CHIPS["v5e-1"]


@pytest.fixture
def asked(monkeypatch):
    """A compiler that reads a program's peak, in GiB, off its first argument; 0 kills it."""
    said = []

    def compile_report(step, size, *others, donate_argnums, chip):
        assert step == "step" and donate_argnums == () and chip == "v5e-1"
        said.append(size)
        if not size:
            raise RuntimeError("the compiler died\nof something")
        return jaxmem.Report(V5E, 0, 0, 0, 0, int(size * 2**30), 0, 0, 0.0)

    monkeypatch.setattr(fitting, "compile_report", compile_report)
    monkeypatch.setattr(fitting, "find_chip", lambda name: V5E)
    return said


def make_step(batch=8, kept=1.0):
    return "step", batch * kept


def test_the_first_that_fits_is_found_with_all_that_was_asked(asked):
    found = find_fitting(options(make_step, batch=[16, 8], kept=[3, 0, 1]), "v5e-1", progress=None)
    assert asked == [48, 0, 16, 24, 0, 8]
    assert found.how == {"batch": 8, "kept": 1} and found.name == "batch=8, kept=1" and found.report.fits
    text, page = str(found), found._repr_html_()
    assert text.count("does not fit") == 3 and "no answer: the compiler died" in text and "<table>" in page
    own = find_fitting({"mine": lambda: ("step", 2)}, "v5e-1", progress=None)
    assert own.name == "mine" and own.how == {}


def test_where_nothing_fits_the_closest_is_told(asked):
    with pytest.raises(NothingFits, match="nothing fits on v5e-1") as error:
        find_fitting(options(make_step, kept=[20, 30]), "v5e-1", progress=None)
    assert "160.00 GiB: does not fit" in str(error.value)


@pytest.mark.parametrize(
    ("peak", "at_most", "multiple_of", "expected", "most_asked"),
    [
        (lambda n: n, 2**20, None, 15, 5),
        (lambda n: 0.011 * n, 2**20, 8, 1424, 5),
        (lambda n: 0.001 * n, 100, None, 100, 3),
        (lambda n: 1.37 + 0.0001 * n, 2**20, None, 143_744, 6),  # 128 * 1123: tokens of a sequence
        (lambda n: 1.37 + 0.0001 * (n + -n % 2048), 2**20, 128, 143_360, 8),  # tiles: a staircase
        (lambda n: 2 + (n / 9000) ** 2, 2**20, None, 33_280, 8),  # plain attention
        (lambda n: 0.1 * n if n < 100 else 0, 2**20, None, 99, 8),  # the compiler dies of more
    ],
)
def test_the_largest_number_that_fits_is_found_by_few_programs(asked, peak, at_most, multiple_of, expected, most_asked):
    make = lambda tokens: ("step", peak(tokens))  # noqa: E731
    found = largest(make, "tokens", "v5e-1", at_most=at_most, multiple_of=multiple_of, progress=None)
    assert found.report.fits and len(asked) <= most_asked, asked
    assert 0.98 * expected <= found.how["tokens"] <= expected
    assert found.how["tokens"] == expected or most_asked == 8


def test_no_number_fits(asked):
    with pytest.raises(NothingFits, match="nothing fits on v5e-1"):
        largest(lambda batch: ("step", 20 * batch), "batch", "v5e-1", progress=None)
    assert asked[-1] == 20 and len(asked) <= 4  # the smallest was asked about
    with pytest.raises(ValueError, match="multiple_of=0"):
        largest(make_step, "batch", "v5e-1", multiple_of=0)


def test_what_cannot_be_asked_is_no_nothing_fits(asked, as_a_user):
    for wrong in ({}, [make_step], {"one": ("step", 1)}):
        with pytest.raises(ValueError, match="expected programs by name"):
            find_fitting(wrong, "v5e-1")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="none of these programs could be compiled") as error:
        find_fitting({"dead": lambda: ("step", 0)}, "v5e-1", progress=None)
    assert not isinstance(error.value, NothingFits)


def test_a_chip_without_a_limit_has_no_largest():
    with pytest.raises(ValueError, match="nothing limits this chip's memory"):
        largest(make_step, "batch", "local")


def test_options_that_are_no_lists_are_refused(as_a_user):
    for wrong, told in ((3, r"batch=\[3\]"), ("no", r"batch=\['no'\]"), ([], "expected a list of values")):
        with pytest.raises(ValueError, match=rf"options\(make_step, batch=.*{told}"):
            options(make_step, batch=wrong)  # pyrefly: ignore[bad-argument-type]
    assert len(options(make_step, batch=(n for n in (1, 2)), kept=range(3))) == 6
