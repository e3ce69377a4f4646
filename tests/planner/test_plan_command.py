"""`python -m llamem plan`: its table, and the exit statuses that scripts rely on."""

import json
import subprocess
import sys
import types

import pytest

import llamem
import llamem.train
from llamem.planner.command import BAD_INPUT, FITS, NOTHING_FITS, main


def test_a_table_has_a_line_for_each_model_and_chip_slices_included(capsys):
    chips = ["v5e-1", "h100", "v5e:4x4"]
    arguments = ["plan", "qwen3-0.6b", "llama3.1-8b", "--chip", *chips, "--tokens", "4096", "--batch", "16"]
    assert main([*arguments, "--estimate"]) == NOTHING_FITS  # 8B on one v5e
    out = capsys.readouterr().out
    assert "roofline" in out.splitlines()[0] and "tokens/s" in out.splitlines()[0]
    assert out.count("nothing fits") == 1 and out.count("TrainSettings") == 5 and "mesh={'fsdp': 16}" in out


def test_weights_wait_on_a_host_of_which_one_tells(capsys):
    arguments = ["plan", "llama3.1-8b", "--chip", "v5e-1", "--estimate"]
    for tokens in (["--tokens", "8192"], []):
        assert main([*arguments, *tokens]) == NOTHING_FITS
        told = capsys.readouterr().err
        assert (
            "weights='host'" in told and "GiB on the host: say how much that can hold, host_bytes or --host-gib" in told
        )
    for tokens in (["--tokens", "8192"], []):  # without, it is the longest context
        assert main([*arguments, *tokens, "--host-gib", "128", "--clip", "layer"]) == FITS
        assert "weights='host'" in capsys.readouterr().out
    assert main([*arguments, "--tokens", "8192", "--host-gib", "8"]) == NOTHING_FITS
    assert "the host has 8.0 GiB" in capsys.readouterr().err


def test_adapters_are_planned(capsys):
    arguments = ["plan", "llama3.1-8b", "--lora", "16", "--tokens", "8192", "--estimate"]
    assert main([*arguments, "--quantize", "q4_0", "--chip", "t4", "v5e-1"]) == FITS
    t4, v5e = capsys.readouterr().out.split("\nllama3.1-8b on v5e-1:")
    assert "products float16" in t4 and "'bfloat16'" not in t4 and "products bfloat16" in v5e
    assert main([*arguments, "--quantize", "q4_0", "--chip", "all"]) == FITS
    assert "v5e-8" not in capsys.readouterr().out
    assert main([*arguments, "--chip", "t4"]) == NOTHING_FITS
    for wrong in (["--lora", "16", "--quantize", "q3"], ["--quantize", "q4_0"], ["--lora", "0"]):
        assert main(["plan", "llama3.1-8b", "--tokens", "8192", "--estimate", *wrong]) == BAD_INPUT, wrong


def test_bad_input_has_a_status_of_its_own_and_never_ends_a_table(capsys):
    for arguments, complaint in (
        (["llama9"], "no preset is called 'llama9'"),
        (["llama3.2-1b", "--chip", "v9"], "no chip is called 'v9'"),
        (["llama3.2-1b", "--tokens", "0"], "seq_len=0"),
        (["llama3.2-1b", "--batch", "0"], "batch_size=0"),
        (["llama3.2-1b", "--host-gib", "-3"], "--host-gib -3: expected the GiB"),
        (["llama3.2-1b", "--host-gib", "inf"], "--host-gib inf: expected the GiB"),
        (["nowhere/config.json"], "nowhere"),
        (["llama3.2-1b", "--param-dtype", "float3"], "float3"),
        (["llama3.2-1b", "--param-dtype", "float16"], "param_dtype is float16, and cannot be trained as it is"),
        (["qwen3-0.6b", "llama3.2-1b", "--tokens", "65536"], "qwen3-0.6b on v5e-1: seq_len=65,536 is beyond"),
    ):
        assert main(["plan", *arguments, "--estimate"]) == BAD_INPUT, arguments
        out, err = capsys.readouterr()
        assert "cannot be" in out and complaint in err
    assert "Plan(" in out


@pytest.mark.parametrize("lora", [[], ["--lora", "16", "--quantize", "q4_0"]])
def test_the_program_that_it_prints_runs(capsys, monkeypatch, lora):
    """Up to what reads the reader's own files, and trains."""
    done = []
    model = types.SimpleNamespace(config=llamem.LlamaConfig.from_name("llama3.2-1b"))
    monkeypatch.setattr(llamem, "load_pretrained", lambda folder, **how: model)
    for module, name in ((llamem.train, "load_corpus"), (llamem.train, "load_chats"), (llamem.text, "Tokenizer")):
        monkeypatch.setattr(module, name, lambda file, *others: file)
    monkeypatch.setattr(llamem.runs, "train", lambda *given, **how: done.append((*given, how)))
    assert main(["plan", "llama3.2-1b", "--tokens", "4096", "--estimate", *lora]) == FITS
    out = capsys.readouterr().out
    exec(out[out.index("import llamem\n") :], {})
    ((config, data, settings, folder, how),) = done
    assert config.replace(param_dtype="float32", compute_dtype="float32") == model.config
    assert (data, settings.seq_len, folder) == ("your chats.jsonl" if lora else "your text.txt", 4096, "run")
    assert isinstance(how["plan"], llamem.Plan) and ("lora" in how) == bool(lora)
    assert lora or config.param_dtype == "bfloat16"


def test_sizes_and_chips_are_taken_as_people_write_them(capsys):
    for tokens in ("8k", "8K", "8,192"):
        assert main(["plan", "qwen3-0.6b", "--chip", "v5e", "h100", "--tokens", tokens, "--estimate"]) == FITS
        out = capsys.readouterr().out
        assert "1 x 8,192" in out and "qwen3-0.6b  v5e-1 " in out and "v5e is taken for v5e-1, one chip." in out
        assert "h100 is taken" not in out
    with pytest.raises(SystemExit) as ended:
        main(["plan", "qwen3-0.6b", "--tokens", "many"])
    assert ended.value.code == BAD_INPUT and "'many' is no number of tokens" in capsys.readouterr().err


def test_a_full_chip_is_told_of(capsys):
    arguments = ["plan", "llama3.2-1b", "--chip", "v5e-1", "--estimate", "--tokens"]
    for tokens, full in (("8k", False), ("20k", True)):
        assert main([*arguments, tokens]) == FITS
        out = capsys.readouterr().out
        assert ("runtime takes for itself" in out) == full, out


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


def test_one_plan_stands_in_a_file_and_no_other_file_is_written_over(tmp_path, capsys):
    file = tmp_path / "plan.json"
    asked = ["--tokens", "4096", "--estimate", "--save", str(file)]
    assert main(["plan", "llama3.2-1b", "qwen3-0.6b", *asked]) == BAD_INPUT and not file.exists()
    assert "--save: one plan stands in a file" in capsys.readouterr().err
    assert main(["plan", "llama3.2-1b", "--chip", "v5e-1", *asked]) == FITS
    out = capsys.readouterr().out
    assert f"python scale/train.py --plan {file} --output FOLDER" in out
    told = json.loads(file.read_text())
    assert (told["model"], told["chip"], told["seq_len"]) == ("llama3.2-1b", "v5e-1", 4096)
    assert f": {llamem.Plan.load(file)!r}: " in out and told["by"] == "estimate, not compiled"
    adapters = [*asked, "--lora", "16"]
    assert main(["plan", "llama3.2-1b", "--chip", "v5e-1", *adapters]) == FITS
    assert f"train.py --plan {file} --init MODEL --chats CHATS.jsonl --output FOLDER" in capsys.readouterr().out
    file.write_text("mine")
    assert main(["plan", "llama3.2-1b", "--chip", "v5e-1", *asked]) == BAD_INPUT
    assert "exists and is no plan" in capsys.readouterr().err and file.read_text() == "mine"
