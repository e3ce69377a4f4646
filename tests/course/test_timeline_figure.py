"""The figure of memory against time shows the bytes it was given; its words are made from the same."""

import dataclasses
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from timelines import MiB, handmade

from jaxmem.reading.timeline import CATEGORIES
from llamem_course import plots
from llamem_course.timeline_figure import COLOURS, largest_made


@pytest.fixture
def four():
    figure = plots.timeline({name: handmade(residuals=i) for i, name in enumerate(("a", "b", "c", "d"), 3)})
    yield figure
    plt.close(figure)


def areas(ax):
    return {area.get_label(): area for area in ax.collections if isinstance(area, PolyCollection)}


def test_areas_have_the_heights_of_the_bytes(four):
    for ax, residuals in zip(four.axes, (3, 4, 5, 6), strict=True):
        found = areas(ax)
        assert list(found) == ["weights", "gradients", "residuals", "logits"]
        top = {label: np.asarray(area.get_paths()[0].vertices)[:, 1].max() for label, area in found.items()}
        assert top["weights"] == 4 and top["logits"] == 4 + residuals + 5
        assert top["residuals"] == 4 + 2 + residuals  # upon the gradients
        line = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
        assert np.max(line.get_ydata()) == 4 + residuals + 5


def test_panels_stand_on_equal_axes_with_passes_loops_and_capacity(four):
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in four.axes}) == 1
    words = [text.get_text() for text in four.axes[0].texts]
    assert {"forward", "backward", "optimizer", "x 16"} <= set(words)
    assert "v5e-1: 13.00 MiB" in words
    # b's buffers would fit, what the compiler sets aside for them does not.
    titles = ["a: 12.0 MiB, 13.0 set aside, fits", "b: 13.0 MiB, 14.0 set aside, does not fit"]
    assert [ax.get_title(loc="left") for ax in four.axes][:2] == titles


def test_the_peak_names_its_three_largest_buffers(four):
    said = next(text.get_text() for text in four.axes[0].texts if "at the peak" in text.get_text())
    assert re.findall(r"[\d.]+ (\w+) ", said.partition("\n")[2]) == ["logits", "residuals"]
    assert [buffer.category for buffer in largest_made(handmade(residuals=9))] == ["residuals", "logits"]


def test_a_note_stands_at_the_peak_in_place_of_the_buffers():
    figure = plots.timeline({"plain": handmade()}, notes={"plain": "the loss"})
    words = [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)
    assert "the loss" in words and not any("at the peak" in word for word in words)


def test_over_seconds_an_operation_is_as_wide_as_it_takes_long():
    plain = handmade()
    with pytest.raises(ValueError, match='depth="code"'):
        plots.timeline({"plain": plain}, over="seconds")
    timed = dataclasses.replace(plain, seconds=tuple(0.001 * (step + 1) for step in range(plain.steps)))
    slow = dataclasses.replace(timed, seconds=tuple(3 * one for one in timed.seconds))
    figure = plots.timeline({"timed": timed, "slow": slow}, over="seconds")
    whole = plain.steps * (plain.steps + 1) / 2
    for ax, pace in zip(figure.axes, (1, 3), strict=True):
        drawn = np.asarray(areas(ax)["logits"].get_paths()[0].vertices)
        high = drawn[drawn[:, 1] == drawn[:, 1].max(), 0]
        logits = next(span for span in plain.buffers if span.category == "logits")
        begin, end = (pace * step * (step + 1) / 2 for step in (logits.first, logits.last + 1))
        assert high.min() == pytest.approx(begin) and high.max() == pytest.approx(end)
        assert ax.get_xlim()[1] == pytest.approx(3 * whole) and ax.get_xlabel() == "ms, the compiler's estimate"
    plt.close(figure)


def test_host_memory_is_a_line_of_its_own(four):
    lines = [line for line in four.axes[0].lines if line.get_label() == "on the host"]
    assert len(lines) == 1 and np.max(lines[0].get_ydata()) == 1
    assert "on the host" in [text.get_text() for text in four.legends[0].get_texts()]


def test_the_words_are_made_from_the_data():
    words = plots.timeline_alt(
        {"plain": handmade(), "larger": handmade(residuals=7), "anywhere": handmade(capacity=None)}
    )
    plain, larger, anywhere = words.split(". ")[1:]
    assert plain.startswith("plain: highest at 12.0 in the forward pass, of it logits 5.0, weights 4.0, residuals 3.0")
    assert "set aside 13.0; within the 13.00 that v5e-1 offers" in plain and "more than the 13.00" in larger
    assert "offers" not in anywhere


def test_every_category_has_a_colour_of_its_own():
    assert list(COLOURS) == list(CATEGORIES) and len(set(COLOURS.values())) == len(CATEGORIES)


def test_the_page_holds_every_byte_and_asks_no_network():
    timeline = handmade()
    tiny = dataclasses.replace(timeline.buffers[1], bytes=10, allocation=9, offset=0, category="batch", first=0, last=4)
    timeline = dataclasses.replace(
        timeline, buffers=(*timeline.buffers, tiny, dataclasses.replace(tiny, allocation=8, offset=0))
    )
    page = plots.timeline_page({"</script> & co": timeline})
    data = json.loads(page.html.partition('id="data">')[2].partition("</script>")[0])
    bands = data["programs"][0]["bands"]
    total = np.zeros(10, np.int64)
    for band in bands:
        for first, last, size in band["runs"]:
            total[first : last + 1] += size
    np.testing.assert_array_equal(total, timeline.curve())
    assert [band["category"] for band in bands] == ["weights", "batch", "gradients", "residuals", "logits"]
    assert bands[1]["name"] == "smaller ones, together" and bands[1]["size"] == 20
    assert data["programs"][0]["host"] == [[2, 6, MiB]]
    assert not re.search(r"https?://|src=|@import|url\(", page.html)
    shown = page._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "</script> & co" not in shown and 'sandbox="allow-scripts"' in shown
