"""The figure of notebook 12: stages wait for each other as links and chips do."""

import matplotlib.pyplot as plt
import pytest

from llamem_course import streamed_figure


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (1.0, [(0, 2, 4), (2, 4, 9), (7, 9, 14)]),  # the chip waits for the link
        (5.0, [(0, 2, 7), (2, 7, 12), (10, 12, 17)]),  # the link waits for the chip
        (9.0, [(0, 2, 11), (2, 11, 20), (14, 20, 29)]),
    ],
)
def test_the_slower_of_link_and_chip_sets_the_pace(compute, expected):
    assert streamed_figure.starts(2.0, compute, 3.0, 3) == expected


def test_layers_are_numbered_from_the_last():
    fig, alt = streamed_figure.backward_drawn([("few", 2.0, 1.0, 3.0), ("many", 2.0, 5.0, 3.0)], 3)
    numbers = [text.get_text() for text in fig.axes[1].texts]
    assert numbers == ["3"] * 3 + ["2"] * 3 + ["1"] * 3
    assert "few: until it computes layer 1, the chip waits for 5.00 s; many" in alt
    assert alt.endswith("waits for 0.00 s.")
    plt.close(fig)
