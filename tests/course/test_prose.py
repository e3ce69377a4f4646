import pytest

from llamem.course.prose import claims


def test_a_claim_is_asserted_as_written_and_told_elsewhere(capsys):
    at_home, elsewhere = claims(as_written=True), claims(as_written=False)
    for claim in (at_home, elsewhere):
        claim(True, "one is one")
    assert not capsys.readouterr().out
    with pytest.raises(AssertionError, match="says that the peak falls, and it is not so"):
        at_home(False, "the peak falls")
    elsewhere(False, "the peak falls")
    assert "otherwise: it does not hold that the peak falls." in capsys.readouterr().out
