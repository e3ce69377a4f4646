"""Processes that play hosts are told three different things each, and a failure is heard."""

import pytest

from llamem_course.processes import printed, start

PROGRAM = """
import sys
address, hosts, host, word = sys.argv[1:]
print("[Gloo] Rank 0 is connected")
print(host, "of", hosts, word)
print(address)
if word == "fail":
    raise ValueError("no such host")
"""


def test_each_process_knows_where_they_meet_how_many_they_are_and_which_it_is(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = (text.splitlines() for text in printed(start(str(program), 2, 7)))
    assert (first[0], second[0]) == ("0 of 2 7", "1 of 2 7")
    assert first[1:] == second[1:] and len(first) == 2  # one address, and nothing of the library between
    with pytest.raises(RuntimeError, match="no such host"):
        printed(start(str(program), 1, "fail"))
