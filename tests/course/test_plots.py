"""Figures: alternative text goes with them, and they show the numbers they were given."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle
from timelines import MiB, handmade

import jaxmem
from jaxmem import GiB
from llamem_course import plots, training_figures
from llamem_course.adapter_figures import block_drawn, freezing_drawn
from llamem_course.price_figure import steps_drawn, steps_drawn_alt, tool_prices


@pytest.fixture
def shown(monkeypatch):
    calls = []
    monkeypatch.setattr(plots, "display", lambda figure, metadata: calls.append((figure, metadata)))
    return calls


def test_show_displays_once_with_its_text_and_closes(shown):
    fig, _ = plt.subplots()
    plots.show(fig, alt="A line that rises.")
    assert shown == [(fig, {"image/png": {"alt": "A line that rises."}})]
    assert not plt.fignum_exists(fig.number)


def test_a_figure_without_words_is_refused(shown):
    fig, _ = plt.subplots()
    with pytest.raises(ValueError, match="say in a sentence"):
        plots.show(fig, alt=" ")
    assert not shown
    plt.close(fig)


def test_bars_add_up_to_the_peak():
    shape = jax.ShapeDtypeStruct((2048, 1024), "float32")
    report = jaxmem.compile_report(lambda a: a @ a.T, shape)
    fig = plots.report_bars({"product": report})
    width = sum(bar.get_bbox().width for bar in fig.axes[0].patches if isinstance(bar, Rectangle))
    assert width == pytest.approx(report.peak_bytes / 2**30)
    assert "GiB" in fig.axes[0].get_xlabel()
    plt.close(fig)


def test_a_loss_and_that_of_a_table_are_drawn_over_the_tokens_read():
    fig = training_figures.loss_curves([9.0, 8.0], {0: 9.5, 2: 7.5}, {0: 9.25, 2: 7.25}, 100)
    drawn = [np.asarray(line.get_xydata()).tolist() for line in fig.axes[0].lines]
    assert drawn == [[[0, 9.0], [100, 8.0]], [[0, 9.5], [200, 7.5]], [[0, 9.25], [200, 7.25]]]
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert "the Llama: 7.50" in texts and "a table of pairs: 7.25" in texts
    plt.close(fig)


def test_the_tokens_with_a_loss_are_marked():
    fig = training_figures.token_strip(["user", "\n", "Aye", "!"], [False, False, True, True])
    patches = {text.get_text(): text.get_bbox_patch() for text in fig.axes[0].texts}
    boxes = {word: patch.get_facecolor() for word, patch in patches.items() if patch}
    assert list(boxes) == ["user", "\\n", "Aye", "!"]
    assert boxes["user"] == boxes["\\n"] != boxes["Aye"] == boxes["!"]
    plt.close(fig)


def test_prices_are_lines_over_the_length_of_the_sequence():
    fig = tool_prices(["a", "b"], {8: [0.5, 0.25], 16: [0.25, 0.0]})
    drawn = [list(np.asarray(line.get_ydata())) for line in fig.axes[0].lines]
    assert drawn == [[50.0, 25.0], [25.0, 0.01]]  # nothing is drawn at the foot of the axis
    assert "under 0.1%" in [text.get_text() for text in fig.axes[0].texts]
    plt.close(fig)


def test_a_step_is_drawn_in_the_lines_of_the_ledger():
    report: Any = SimpleNamespace(timeline=handmade(), peak_bytes=13 * MiB, capacity_bytes=None)
    fig = steps_drawn({"a": report})
    tops = {area.get_label(): np.asarray(area.get_paths()[0].vertices)[:, 1].max() for area in fig.axes[0].collections}
    assert list(tops) == ["weights", "moments", "gradients", "inputs", "at work"]
    assert tops["at work"] == 12 * MiB / GiB and tops["inputs"] == 9 * MiB / GiB
    plt.close(fig)
    assert "At the highest point weights" in steps_drawn_alt({"a": report})


def test_what_a_frozen_matrix_saves_is_drawn_to_scale():
    fig = freezing_drawn(256, 512, 16)
    boxes = [box for box in fig.axes[0].patches if isinstance(box, Rectangle)]
    whole = [box.get_linestyle() for box in boxes if (box.get_width(), box.get_height()) == (512, 256)]
    thin = [box for box in boxes if (box.get_width(), box.get_height()) == (16, 256)]
    assert (whole.count("solid"), whole.count("--"), len(thin)) == (5, 3, 4)
    plt.close(fig)


def test_a_block_is_drawn_with_its_bytes():
    fig = block_drawn()
    widths = Counter(box.get_width() for box in fig.axes[0].patches if isinstance(box, Rectangle))
    assert widths == {2: 32 + 32 + 1, 1: 16}
    plt.close(fig)
