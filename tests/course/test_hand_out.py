"""What a class is given: the stored notebooks, without solutions and without outputs that are to be predicted."""

import copy
import json
import re
from pathlib import Path

import nbformat
import pytest

from llamem_course.__main__ import main

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def tags(cell):
    return cell["metadata"].get("tags", [])


def answers_taken_out(notebook):
    """The same, said in another way: cell by cell."""
    cells = []
    for cell in copy.deepcopy(notebook["cells"]):
        if "predict" in tags(cell):
            cell["outputs"] = []
        if "solution" not in tags(cell):
            cells.append(cell)
    first = cells[0]["source"]
    badges = [i for i, line in enumerate(first) if "colab-badge.svg" in line]
    for i in badges:
        del first[i : i + 2]  # and the empty line after it
    return notebook | {"cells": cells}


def test_a_hand_out_is_the_course_without_its_answers_whole_or_not_at_all(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "class"
    source.mkdir()
    for path in NOTEBOOKS.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    # One notebook with every case: a tag beside others, an answer in a code cell, nothing to leave out.
    made = nbformat.v4.new_notebook()
    made.cells = [
        nbformat.v4.new_markdown_cell("**1.** Ünïcode, and a solution that is none <details>"),
        nbformat.v4.new_code_cell("stub", metadata={"tags": ["exercise"]}, execution_count=1),
        nbformat.v4.new_markdown_cell("SECRET", metadata={"tags": ["solution"]}),
        nbformat.v4.new_code_cell("SECRET", metadata={"tags": ["nbval-check-output", "solution"]}),
        nbformat.v4.new_code_cell("look", metadata={"tags": ["predict", "nbval-check-output"]}, execution_count=2),
        nbformat.v4.new_code_cell("shown", execution_count=3),
    ]
    for cell, text in ((made.cells[1], "kept"), (made.cells[4], "SECRET"), (made.cells[5], "kept")):
        cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    nbformat.write(made, source / "99_made.ipynb")
    stored = {path.name: path.read_bytes() for path in source.iterdir()}

    assert main(["--hand-out", str(out), "--from", str(source)]) == 0
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(written) == set(stored) and "GLOSSARY.md" in written, "a page that notebooks link to is missing"
    for name, content in stored.items():
        if not name.endswith(".ipynb"):
            assert written[name] == content
            continue
        before, after = json.loads(content), json.loads(written[name])
        assert after == answers_taken_out(before), name
        if after == before:
            assert written[name] == content, f"{name} has nothing to leave out, and other bytes than it is stored with"
        if name == "99_made.ipynb":
            nbformat.validate(nbformat.from_dict(after))
    assert b"SECRET" not in written["99_made.ipynb"] and written["99_made.ipynb"].count(b"kept") == 2
    assert len(json.loads(written["99_made.ipynb"])["cells"]) == 4
    counted = [cell for name in stored if name.endswith(".ipynb") for cell in json.loads(stored[name])["cells"]]
    solutions = sum("solution" in tags(cell) for cell in counted)
    outputs = sum("predict" in tags(cell) and bool(cell["outputs"]) for cell in counted)
    assert f"without {solutions} solutions and {outputs} outputs to predict" in capsys.readouterr().out

    assert main(["--hand-out", str(tmp_path / "one"), "--from", str(source), "--only", "04"]) == 0
    (one,) = (tmp_path / "one").glob("*.ipynb")
    assert one.name.startswith("04_")
    links = re.findall(r"\]\(([^)#]*\.ipynb)", one.read_text())
    assert links and all(link.startswith("https://github.com/") for link in links), "a link to what is not there"
    capsys.readouterr()

    def refused(*arguments):
        before = sorted(path.name for path in tmp_path.rglob("*"))
        assert main([str(argument) for argument in arguments]) == 2
        assert sorted(path.name for path in tmp_path.rglob("*")) == before, "something is left of a refused hand-out"
        return capsys.readouterr().err

    assert "exists and is not empty" in refused("--hand-out", out, "--from", source)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written
    assert "begins with '77'. There are: 00_" in refused(
        "--hand-out", tmp_path / "new", "--from", source, "--only", "77"
    )
    assert "holds no notebooks" in refused("--hand-out", tmp_path / "new", "--from", tmp_path)
    assert "holds no notebooks" in refused("--hand-out", tmp_path / "new", "--from", tmp_path / "nowhere")
    (source / "zz_cut.ipynb").write_text('{"cells": [')
    assert "zz_cut.ipynb holds no JSON object" in refused("--hand-out", tmp_path / "new", "--from", source)
    (source / "zz_cut.ipynb").write_text('{"worksheets": []}')
    assert "no notebook of version 4" in refused("--hand-out", tmp_path / "new", "--from", source)
    with pytest.raises(SystemExit):
        main([])
