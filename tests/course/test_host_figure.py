"""The figure of notebook 11: every chip has its part of the matrix and its tokens."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba

from llamem_course.host_figure import meshes_drawn


def test_of_three_meshes_each_chip_has_its_part_of_the_matrix_and_its_tokens():
    fig = meshes_drawn()
    filled = [sum(to_rgba(patch.get_facecolor())[3] == 1.0 for patch in ax.patches) for ax in fig.axes]
    assert filled == [8 * (8 + 8), 8 * (1 + 8), 8 * (8 + 1)]
    plt.close(fig)
