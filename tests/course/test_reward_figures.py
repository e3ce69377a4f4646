"""The figures of notebook 13: groups stand side by side, and what pairs move is drawn seed by seed."""

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


def test_each_loss_has_a_picture_and_each_seed_two_lines():
    sums = np.array([[[-20.0, -22.0], [-1.0, -1.0]], [[-8.0, -8.0], [-2.0, -4.0]]])
    fig, alt = reward_figures.preference_curves({"alone": [sums, 2 * sums], "with": [sums, sums]})
    assert "alone: -21 to -8, -42 to -16; with: -21 to -8, -21 to -8" in alt
    assert [ax.get_title() for ax in fig.axes] == ["alone", "with"]
    np.testing.assert_allclose(np.asarray(fig.axes[0].get_lines()[3].get_ydata()), [-2, -6])
    plt.close(fig)
