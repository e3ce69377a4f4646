"""`python -m llamem table`: a grid that is asked once, goes on where it was stopped, and is asked again at random."""

import functools
import json
import re
from pathlib import Path

import pytest

from llamem.planner import grid
from llamem.planner.command import BAD_INPUT, FITS, NOTHING_FITS, main

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "can_i_train_it.jsonl"
TOLD = re.compile(r"^(\S+) +(\S+) +1 x ([\d,]+) +([\d.]+) .* (Plan\(.*?\))(?:;|$)", re.MULTILINE)


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the planner, by estimate: models' names are their sizes here, so chips and tokens tell."""
    questions = []
    plain = grid.find_plan

    def find(config, chip, **options):
        questions.append((chip, options["seq_len"], options["host_bytes"]))
        return plain(config, chip, compiler=False, **options)

    monkeypatch.setattr(grid, "find_plan", find)
    return questions


ASK = ["--models", "llama3.1-8b", "--ways", "all parameters", "adapters over four bits", "--chip", "t4", "v5e-4"]
ASK += ["--tokens", "2k", "128k"]


def test_a_row_for_each_question_also_after_a_stop(asked, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    arguments = ["table", "--out", str(file), *ASK]
    assert main(arguments) == FITS
    whole = file.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    found = {(row["way"], row["chip"], row["tokens"]): row["fits"] and row["host_bytes"] / 2**30 for row in rows}
    # Four bits are not split over a slice. On a host: 8B with its moments; 32 layers' inputs, each of 2 x 4,096 bytes a
    # token; those and attention's outputs.
    assert found == {
        ("all parameters", "t4", 2048): pytest.approx(43, rel=0.2),
        ("all parameters", "t4", 131_072): False,
        ("all parameters", "v5e-4", 2048): 4 * 2048 * 32 * 8192 / 2**30,
        ("all parameters", "v5e-4", 131_072): False,
        ("adapters over four bits", "t4", 2048): 0,
        ("adapters over four bits", "t4", 131_072): 2 * 131_072 * 32 * 8192 / 2**30,
    }
    assert f"6 of 6: {grid._in_words(rows[-1])}\n" in capsys.readouterr().err

    # Stopped within a row, and started again: what is there is not asked, and the file is the same.
    asked.clear()
    file.write_text(whole[: -len(rows[-1])])
    assert main(arguments) == FITS and file.read_text() == whole
    assert {(chip, tokens) for chip, tokens, _ in asked} == {(rows[-1]["chip"], rows[-1]["tokens"])}


def test_after_what_does_not_fit_nothing_longer_is_asked(asked, tmp_path):
    file = tmp_path / "rows.jsonl"
    few = ["--models", "llama3.1-70b", "--ways", "all parameters", "--chip", "v5e-4", "--tokens", "64k", "128k"]
    assert main(["table", "--out", str(file), *few]) == FITS
    first, second = map(json.loads, file.read_text().splitlines())
    assert not first["fits"] and "nothing fits" in first["why"] and not second["fits"]
    assert second["why"] == "a shorter one does not fit" and {tokens for _, tokens, _ in asked} == {65_536}


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    for text in ("# Notes", "# Notes\n", '{"model": 1}\n'):
        file = tmp_path / "notes.md"
        file.write_text(text)
        assert main(["table", "--out", str(file), *ASK]) == BAD_INPUT
        assert file.read_text() == text and "line 1, is no row of a table" in capsys.readouterr().err
    assert main(["table", "--out", str(tmp_path / "new"), "--models", "gpt5"]) == BAD_INPUT
    assert not (tmp_path / "new").exists()


def test_rows_are_asked_again_and_a_peak_that_moved_is_told(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "_row", functools.partial(_by_somebody, grid._row))
    file = tmp_path / "rows.jsonl"
    few = ["table", "--out", str(file), "--models", "llama3.2-1b", "--ways", "all parameters", "--chip", "h100"]
    assert main([*few, "--tokens", "2k", "4k"]) == FITS
    assert main([*few, "--check", "9"]) == FITS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["peak_bytes"] = int(rows[1]["peak_bytes"] * 1.02)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*few, "--check", "9"]) == NOTHING_FITS
    assert "bytes; again: 12,121,370,624 bytes, +0" in capsys.readouterr().err


def _by_somebody(row, *arguments):
    return {**row(*arguments), "by": "an estimate"}


def test_pages_and_notebook_tell_what_the_rows_say():
    rows = {tuple(row[name] for name in ("model", "way", "chip", "tokens")): row for row in grid.read(ROWS)}
    told = []
    for page in ("README.md", "docs/how_do_i.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for command, lines in re.findall(r"llamem plan (.*)\n```\n\n```\n((?:.*\n)+?)```", text):
            way = "adapters over four bits" if "--quantize q4_0" in command else "all parameters"
            told += [(model, way, chip, tokens, gib, plan) for model, chip, tokens, gib, plan in TOLD.findall(lines)]
    notebook = (ROOT / "notebooks" / "08_long_context.ipynb").read_text(encoding="utf-8")
    plan, gib = re.findall(r'"(Plan\(.*\)): ([\d.]+) of .* on v5e-1 \(compiled\)', notebook)[0]
    told.append(("llama3.2-1b", "all parameters", "v5e-1", "131,072", gib, plan))
    assert len(told) == 4
    for *question, tokens, gib, plan in told:
        row = rows[*question, int(tokens.replace(",", ""))]
        assert (f"{row['peak_bytes'] / 2**30:.2f}", row["plan"]) == (gib, plan), row
