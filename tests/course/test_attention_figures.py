"""Notebook 06's figure of RoPE shows the angles that it is given."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.attention_figures import turning_pair, turning_pair_alt


def test_the_angle_between_query_and_key_is_told_and_stays_when_both_move():
    angle_p = 500_000.0 ** (-np.arange(4) / 4)
    drawn = (1.0, 0.0), (0.0, 1.0), 0.1, [(5, 3), (25, 23), (5, 4)], angle_p, angle_p / 2, 8192
    fig = turning_pair(*drawn)
    assert [ax.get_title() for ax in fig.axes[:3]] == [f"query at {a}, key at {b}" for a, b in drawn[3]]
    ends = [np.asarray(line.get_ydata())[-1] for line in fig.axes[3].lines[:2]]
    assert np.allclose(ends, 8192 * angle_p[-1] / np.array([2 * np.pi, 4 * np.pi]))
    words = turning_pair_alt(*drawn)
    assert (
        "at 5 and 3 281°, at 25 and 23 281°, at 5 and 4 276°" in words
        and "1 of 4 pairs make less than one turn" in words
    )
    plt.close(fig)
