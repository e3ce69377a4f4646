import types

import pytest

from llamem_course import checks


def run_in(monkeypatch, **names):
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(user_ns=names))


def test_a_claim_is_asserted_in_the_courses_tests_and_told_to_a_reader(monkeypatch, capsys):
    monkeypatch.setenv("LLAMEM_CLAIMS", "raise")
    checks.written_for({"tokens": 8192, "chips": ["t4"]})
    run_in(monkeypatch, tokens=8192, chips=["t4"], other=1)
    checks.claim(True, "tiles need less")
    with pytest.raises(AssertionError, match=r"^The text says that tiles need less\. In this run it is not so\.$"):
        checks.claim(False, "tiles need less")
    run_in(monkeypatch, tokens=4096, chips=["t4"])
    checks.claim(True, "tiles need less")
    assert capsys.readouterr().out == ""
    checks.claim(False, "tiles need less")
    told = "Here it is otherwise than in the text: it does not hold that tiles need less.\n"
    assert capsys.readouterr().out == told
    run_in(monkeypatch, tokens=8192, chips=["t4"])
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    checks.claim(False, "tiles need less")
    assert capsys.readouterr().out == told
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    monkeypatch.delenv("LLAMEM_CLAIMS")  # as a reader runs it, with whichever compilers
    checks.claim(False, "tiles need less")
    assert capsys.readouterr().out == told
