"""The figure of notebook 12: stages wait for each other as links and chips do."""

import matplotlib.pyplot as plt
import pytest

from llamem_course import streamed_figure


def test_one_stage_follows_the_other():
    assert streamed_figure.starts(2.0, 3.0, 2, beside=False) == [(0, 2, 5), (7, 9, 12)]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (1.0, [(0, 2, 3), (2, 4, 5), (4, 6, 7)]),  # the chip waits for the link
        (5.0, [(0, 2, 7), (2, 7, 12), (7, 12, 17)]),  # the link waits for the chip
    ],
)
def test_the_slower_of_link_and_chip_sets_the_pace(compute, expected):
    assert streamed_figure.starts(2.0, compute, 3, beside=True) == expected


def test_layers_are_numbered_from_the_last():
    fig, alt = streamed_figure.backward_drawn(2.0, [("in turns", 1.0, False), ("beside", 5.0, True)], 3)
    numbers = [text.get_text() for text in fig.axes[1].texts]
    assert numbers == ["3"] * 3 + ["2"] * 3 + ["1"] * 3
    assert "in turns: 3 layers in 15.00 s, 3.00 of them matmuls" in alt
    plt.close(fig)
