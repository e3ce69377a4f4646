import pytest

from llamem.course.prose import as_list, claims


def test_a_claim_is_asserted_as_written_and_told_elsewhere(capsys):
    at_home, elsewhere = claims(as_written=True), claims(as_written=False)
    for claim in (at_home, elsewhere):
        claim(True, "one is one")
    assert not capsys.readouterr().out
    with pytest.raises(AssertionError, match="says that the peak falls, and it is not so"):
        at_home(False, "the peak falls")
    elsewhere(False, "the peak falls")
    assert "otherwise: it does not hold that the peak falls." in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[1024, 2048]", "(1024, 2048)", [1024, 2048], (1024, 2048)])
def test_a_list_is_read_from_its_text(text):
    assert as_list(text) == [1024, 2048]


def test_names_are_read_in_json_and_in_python():
    assert as_list('["v6e-1"]') == as_list("['v6e-1']") == ["v6e-1"]


@pytest.mark.parametrize("text", ["v6e-1", "1024", 1024, '{"v6e-1": 1}', "[v6e-1", None])
def test_what_is_no_list_is_refused_with_a_sentence(text):
    with pytest.raises(ValueError, match=r"is no list: expected one such as \[1024, 2048\]"):
        as_list(text)
