"""The figure of notebook 11: bars to scale, of what a chip holds and of what arrives."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.host_figure import meshes_compared


def test_of_each_mesh_what_a_chip_holds_and_receives_is_drawn_to_scale():
    fig, alt = meshes_compared({"one": (1, 2, 3), "two": (1, 5, 4)}, {"one": (7, 1), "two": (2, 3)}, 15.75)
    ends = [[bar.get_extents().transformed(ax.transData.inverted()).x1 for bar in ax.patches] for ax in fig.axes]
    for found, right in zip(ends, ([1, 1, 3, 6, 6, 10], [7, 2, 8, 5]), strict=True):
        np.testing.assert_allclose(found, right)
    assert alt.endswith("one: holds 6.0, receives 8.0; two: holds 10.0, receives 5.0.")
    plt.close(fig)
