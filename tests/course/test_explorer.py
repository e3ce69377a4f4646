"""The explorer of plans: what its controls say is what is estimated, and the compiler's answer is shown beside it."""

from typing import Any

import pytest

import llamem
from jaxmem import GiB
from llamem_course import explorer, plots
from llamem_course.explorer import Explorer, bars_html, estimate_bars, estimate_bars_alt


def test_the_controls_are_the_plan_and_every_change_is_drawn():
    one = Explorer(seq_len=8192)
    assert one.plan == llamem.Plan()
    before = one.bars.value
    one.controls["head_groups"].value = 4
    one.controls["offload"].value = ("block_in",)
    assert one.plan == llamem.Plan(head_groups=4, offload=("block_in",))
    assert one.bars.value != before and f"{one.estimate().peak_bytes / GiB:.2f}" in one.bars.value


def test_tools_that_exclude_each_other_are_explained_and_nothing_breaks():
    one = Explorer(seq_len=8192)
    one.controls["remat"].value = "qkv_attn"
    one.controls["head_groups"].value = 8
    assert "cannot be kept" in one.bars.value
    one.controls["remat"].value = "nothing"
    assert "by estimate" in one.bars.value


def test_the_button_shows_the_compilers_answer(monkeypatch):
    asked = []

    def refuse(one):
        asked.append((one.plan, one.chip.name, one.question.seq_len, one.question.batch_size))
        raise RuntimeError("the compiler died with signal 11")

    monkeypatch.setattr(explorer.Estimate, "compile", refuse)
    one = Explorer(seq_len=8192)
    one.button.click()
    assert asked == [(llamem.Plan(), "v5e-1", 8192, 1)]


def test_the_bars_add_up_and_say_so_in_words():
    config = llamem.LlamaConfig.from_name("llama3.2-1b")
    found = {chip: llamem.estimate(config, chip=chip, seq_len=8192) for chip in ("v5e-1", "h100")}
    fig = estimate_bars(found)
    (ax,) = fig.axes
    ends: dict[int, float] = {}
    patches: Any = ax.patches  # rectangles
    for patch in patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        ends[row] = max(ends.get(row, 0), patch.get_x() + patch.get_width())
    assert sorted(ends.values()) == pytest.approx(sorted(one.peak_bytes / GiB for one in found.values()))
    written = {text.get_text().partition("\n")[0] for text in ax.texts}
    assert {"weights", "moments"} <= written <= {line.name for one in found.values() for line in one.lines}
    plots.plt.close(fig)
    assert "v5e-1: " in estimate_bars_alt(found) and "weights" in estimate_bars_alt(found)
    assert 'role="img"' in bars_html(found["h100"])
