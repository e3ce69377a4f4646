"""The figures of notebook 13: groups stand side by side, and each training by pairs has a picture."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course import reward_figures


def test_the_groups_of_a_round_are_drawn_apart():
    rounds = [np.array([[0.5, 0.25, 0, 0], [0, 0, 0, 0]])]
    fig, alt = reward_figures.reward_rounds(rounds)
    dots = {line.get_label(): np.asarray(line.get_xdata()) for line in fig.axes[0].get_lines()}
    assert dots["answers to question 1 of a round"].max() < dots["answers to question 2 of a round"].min()
    assert alt.endswith("round by round: 0.09.")
    plt.close(fig)


def test_each_training_has_a_picture_with_both_answers():
    sums = np.array([[[-20.0, -22.0], [-1.0, -1.0]], [[-8.0, -8.0], [-2.0, -4.0]]])
    fig, alt = reward_figures.preference_curves({"alone": sums, "with": 2 * sums})
    assert "alone: -21.0 to -8.0; with: -42.0 to -16.0" in alt
    assert [ax.get_title() for ax in fig.axes] == ["alone", "with"]
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in fig.axes[0].get_lines()}
    np.testing.assert_allclose(lines["worse answer"], [-1, -3])
    plt.close(fig)
