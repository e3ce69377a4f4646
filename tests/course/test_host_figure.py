"""The figures of notebook 11: bars to scale, divided into parts."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.host_figure import mesh_bars


def test_the_parts_of_each_mesh_are_drawn_to_scale_and_told():
    rows = {"one": {"inputs": 1, "other": 5}, "two": {"inputs": 6, "other": 4}}
    fig, alt = mesh_bars(rows, "GiB at the peak", line=(15.75, "a chip offers 15.75"))
    (ax,) = fig.axes
    ends = [bar.get_extents().transformed(ax.transData.inverted()).x1 for bar in ax.patches]
    np.testing.assert_allclose(ends, [1, 6, 6, 10])
    assert {text.get_text() for text in ax.texts} >= {"5.0", "6.0", "4.0", "10.0"}
    assert alt.startswith("Bars for each mesh, GiB at the peak. one: 6.0, of it inputs 1.0, other 5.0; two: 10.0")
    plt.close(fig)
