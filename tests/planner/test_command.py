"""`python -m llamem plan`: its table, its JSON, and the exit statuses that scripts rely on."""

import json
import math
import subprocess
import sys

import pytest

from llamem import CHIPS
from llamem.planner.command import BAD_INPUT, FITS, NOTHING_FITS, main


def test_json_says_what_a_script_needs(capsys):
    status = main(["plan", "llama3.2-1b", "--chip", "v6e-1", "--tokens", "32768", "--estimate", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert status == FITS and row["fits"] and row["compiled"] is False
    assert row["chip"] == "v6e-1" and row["seq_len"] == 32_768
    assert 0 < row["peak_bytes"] <= row["capacity_bytes"] == CHIPS["v6e-1"].capacity_bytes
    assert row["plan"]["mode"] in ("scan", "nested") and row["alternatives"]


def test_a_table_has_a_line_for_each_model_and_chip(capsys):
    status = main(["plan", "qwen3-0.6b", "llama3.1-8b", "--chip", "v5e-1", "h100", "--tokens", "4096", "--estimate"])
    out = capsys.readouterr().out
    assert status == NOTHING_FITS  # 8B on one v5e
    assert out.count("nothing fits") == 1 and out.count("TrainSettings") == 3
    assert "estimated" in out.splitlines()[0] and "tokens/s" in out.splitlines()[0]


def test_weights_wait_on_a_host_of_which_one_tells(capsys):
    arguments = ["plan", "llama3.1-8b", "--chip", "v5e-1", "--tokens", "8192", "--estimate", "--json"]
    assert main([*arguments, "--host-gib", "128", "--clip", "layer"]) == FITS
    (row,) = json.loads(capsys.readouterr().out)
    assert row["plan"]["weights"] == "host" and row["host_bytes"] < 128 * 2**30
    assert main([*arguments, "--host-gib", "8"]) == NOTHING_FITS
    assert "the host has 8.0 GiB" in capsys.readouterr().out


def test_without_tokens_it_is_the_longest_context_with_what_the_host_holds(capsys):
    arguments = ["plan", "llama3.1-8b", "--chip", "v5e-1", "--estimate", "--json"]
    assert main(arguments) == NOTHING_FITS
    capsys.readouterr()
    assert main([*arguments, "--host-gib", "128", "--clip", "layer"]) == FITS
    (row,) = json.loads(capsys.readouterr().out)
    assert row["seq_len"] % 1024 == 0 and row["seq_len"] > 4096 and row["plan"]["weights"] == "host"


def test_bad_input_has_a_status_of_its_own(capsys):
    for arguments, complaint in (
        (["llama9"], "no preset is called 'llama9'"),
        (["llama3.2-1b", "--chip", "v9"], "no chip is called 'v9'"),
        (["llama3.2-1b", "--tokens", "0"], "seq_len=0"),
        (["llama3.2-1b", "--batch", "0"], "batch_size=0"),
        (["nowhere/config.json"], "nowhere"),
        (["llama3.2-1b", "--param-dtype", "float3"], "float3"),
    ):
        assert main(["plan", *arguments, "--estimate"]) == BAD_INPUT, arguments
        assert complaint in capsys.readouterr().err
    for size in ("inf", "nan", "-3", "much"):
        with pytest.raises(SystemExit) as error:
            main(["plan", "llama3.2-1b", f"--host-gib={size}", "--estimate"])
        assert error.value.code == BAD_INPUT and "--host-gib" in capsys.readouterr().err


def test_one_impossible_model_never_ends_a_table(capsys):
    arguments = ["plan", "qwen3-0.6b", "llama3.2-1b", "--tokens", "65536", "--estimate"]
    assert main(arguments) == BAD_INPUT
    out, err = capsys.readouterr()
    assert "cannot be" in out and "Plan(" in out and "error: qwen3-0.6b on v5e-1: seq_len=65,536 is beyond" in err


def test_slices_are_chips(capsys):
    arguments = [
        "plan",
        "llama3.1-8b",
        "--chip",
        "v5e:4x4",
        "--tokens",
        "4096",
        "--batch",
        "16",
        "--estimate",
        "--json",
    ]
    assert main(arguments) == FITS
    (row,) = json.loads(capsys.readouterr().out)
    assert row["chip"] == "v5e:4x4" and math.prod(row["plan"]["mesh"].values()) == 16


def test_it_is_a_command(capsys):
    done = subprocess.run(
        [sys.executable, "-m", "llamem", "plan", "--help"], capture_output=True, text=True, check=True
    )
    assert "Exit status: 0 it fits, 1 nothing fits, 2 bad input." in done.stdout
    assert main([]) == FITS and "plan" in capsys.readouterr().out
    for arguments, status, words in ((["--version"], FITS, "llamem 0"), (["fly"], BAD_INPUT, "")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status and words in capsys.readouterr().out
