"""The figure of the logits puts each array where it lies, and says whether the gradient is one of them."""

import dataclasses

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle
from timelines import handmade

from jaxmem.report import GiB
from llamem_course import plots


@pytest.fixture
def towers():
    plain = handmade(residuals=1)
    logits = next(span for span in plain.buffers if span.category == "logits")
    later = {"first": logits.last, "last": logits.last + 2, "offset": logits.offset + logits.bytes}
    gradient = dataclasses.replace(logits, name="gradient", made_in="backward", **later)
    return {"both": dataclasses.replace(plain, buffers=(*plain.buffers, gradient)), "fused": plain}


def test_each_array_stands_on_the_one_below_it_from_first_to_last(towers):
    figure = plots.tower(towers)
    both, fused = figure.axes
    bars = [bar for bar in both.patches if isinstance(bar, Rectangle)]
    low, high = sorted((bar.get_y() * GiB, bar.get_height() * GiB, bar.get_x()) for bar in bars)
    gradient = towers["both"].buffers[-1]
    assert high == pytest.approx((low[0] + low[1], gradient.bytes, gradient.first))
    assert sum(high[:2]) == pytest.approx(towers["both"].peak_bytes)
    words = [[text.get_text() for text in ax.texts] for ax in (both, fused)]
    plt.close(figure)
    assert {"logits", "their gradient"} <= set(words[0]) and any("writes their gradient" in word for word in words[0])
    assert "no array of the gradient" in words[1]


def test_the_words_are_made_from_the_data(towers):
    both, fused = plots.tower_alt(towers).split(". ")[1:]
    assert "logits 3 to 4; their gradient 4 to 6; highest at operation 4" in both
    assert "their gradient never" in fused


def test_a_program_without_logits_is_drawn(towers):
    none = tuple(span for span in towers["fused"].buffers if span.category != "logits")
    plt.close(plots.tower({"tiled": dataclasses.replace(towers["fused"], buffers=none)}))
