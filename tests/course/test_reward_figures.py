"""The figures of notebook 13: groups stand side by side, and what pairs move is told in words."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course import reward_figures


def test_the_groups_of_a_round_are_drawn_apart():
    rounds = [np.array([[0.5, 0.25, 0, 0], [0, 0, 0, 0]])]
    fig = reward_figures.reward_rounds(rounds, np.zeros(3), np.ones(3))
    dots = {line.get_label(): np.asarray(line.get_xdata()) for line in fig.axes[0].get_lines()}
    assert dots["drawn answer, question 1"].max() < dots["drawn answer, question 2"].min()
    assert "mean 0.09" in reward_figures.reward_rounds_alt(rounds, np.zeros(3), np.ones(3))
    plt.close(fig)


def test_what_a_worse_answer_loses_goes_to_others():
    sums = [np.array([[-20.0, -20.0], [-0.5, -0.5]]), np.array([[-8.0, -8.0], [-1.0, -1.0]])]
    fig, alt = reward_figures.preference_curves(sums)
    assert "-20.0 to -8.0" in alt and "worse answer 0.61 before, 0.37 after; all others 0.39 before, 0.63 after" in alt
    assert {"19.5 apart", "7.0 apart"} <= {text.get_text() for text in fig.axes[0].texts}
    plt.close(fig)
