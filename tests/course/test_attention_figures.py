"""Notebook 06's figure of RoPE shows the places and the angles that it is given."""

import matplotlib.pyplot as plt

from llamem_course.attention_figures import turning_pair, turning_pair_alt


def test_the_angle_between_query_and_key_is_told_and_stays_when_both_move():
    drawn = (1.0, 0.0), (0.0, 1.0), 0.1, [(5, 3), (25, 23), (5, 4)]
    fig = turning_pair(*drawn)
    assert [ax.get_title() for ax in fig.axes] == [f"query at {a}, key at {b}" for a, b in drawn[3]]
    assert [ax.texts[-1].get_text() for ax in fig.axes] == ["281°", "281°", "276°"]
    assert "at 5 and 3 281°, at 25 and 23 281°, at 5 and 4 276°" in turning_pair_alt(*drawn)
    plt.close(fig)
