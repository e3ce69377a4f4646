"""The picture of what each policy costs: a point for each, apart where it does not fit."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.policy_figure import trade


def test_each_choice_stands_where_its_numbers_are():
    fig, alt = trade({"some": 90.0, "all": 80.0}, {"some": 11.0, "all": 20.0}, "v5e-1", 15.75)
    (ax,) = fig.axes
    np.testing.assert_allclose([np.ravel(line.get_xydata()) for line in ax.lines[1:]], [[90, 11], [80, 20]])
    assert ax.lines[1].get_color() != ax.lines[2].get_color()
    assert "some: 90.0, 11.0; all: 80.0, 20.0" in alt and np.allclose(ax.lines[0].get_ydata(), 15.75)
    plt.close(fig)
