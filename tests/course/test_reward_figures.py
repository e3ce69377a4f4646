"""The figures of notebook 13: a group of answers with their advantages, and a picture for each training by pairs."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course import reward_figures


def test_the_group_whose_rewards_differ_most_is_drawn_the_best_answer_first():
    rewards, advantages = np.array([[0.5, 0.5], [0, 0.75]]), np.array([[0.0, 0.0], [-0.7, 0.7]])
    fig, alt = reward_figures.group_bars(["a", "b", "c", "d\ne"], rewards, advantages)
    assert alt.endswith("d e (0.75): +0.70; c (0.00): -0.70.")
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["d e (0.75)", "c (0.00)"]
    plt.close(fig)


def test_each_training_has_a_picture_with_both_answers():
    sums = np.array([[[-20.0, -22.0], [-1.0, -1.0]], [[-8.0, -8.0], [-2.0, -4.0]]])
    fig, alt = reward_figures.preference_curves({"alone": sums, "with": 2 * sums})
    assert "alone: -21.0 to -8.0; with: -42.0 to -16.0" in alt
    assert [ax.get_title() for ax in fig.axes] == ["alone", "with"]
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in fig.axes[0].get_lines()}
    np.testing.assert_allclose(lines["worse answer"], [-1, -3])
    plt.close(fig)
