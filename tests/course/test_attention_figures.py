"""Notebook 06's figures of attention show the angles, the mask and the heads that they are given."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.attention_figures import causal_and_shared, causal_and_shared_alt, turning_pair, turning_pair_alt


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


def test_a_query_sees_itself_and_what_was_before_and_each_key_head_serves_its_group():
    fig = causal_and_shared(5, 8, 2)
    mask, heads = fig.axes
    assert np.array_equal(np.asarray(mask.images[0].get_array()), np.tril(np.ones((5, 5))))
    lines = [np.asarray(line.get_xdata()).tolist() for line in heads.lines]
    ends = [tuple(line) for line in lines if len(line) == 2]
    assert ends == [(head, 1.5 if head < 4 else 5.5) for head in range(8)]
    assert "each of these serves 4" in causal_and_shared_alt(5, 8, 2)
    plt.close(fig)
