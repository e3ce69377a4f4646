"""The figures of notebook 11: pieces with the numbers of their chips, and bars to scale, divided into parts."""

import matplotlib.pyplot as plt
import numpy as np

from llamem_course.pod_figures import mesh_bars, mesh_maps


def test_the_parts_of_each_mesh_are_drawn_to_scale_and_told():
    rows = {"one": {"inputs": 1, "other": 5}, "two": {"inputs": 6, "other": 4}}
    times = {"one": {"sums": 0.0}, "two": {"sums": 3.0}}
    line = 15.75, "a chip offers 15.75"
    fig, alt = mesh_bars({"GiB at the peak": (rows, line), "seconds": (times, (9.0, "matmuls 9 s"))})
    ax, _ = fig.axes
    ends = [bar.get_extents().transformed(ax.transData.inverted()).x1 for bar in ax.patches]
    np.testing.assert_allclose(ends, [1, 6, 6, 10])
    assert {text.get_text() for text in ax.texts} >= {"5.0", "6.0", "4.0", "10.0"}
    assert "GiB at the peak. one: 6.0, of it inputs 1.0, other 5.0; two: 10.0" in alt and "two: 3.0, of it sums" in alt
    plt.close(fig)


def test_each_chip_of_a_mesh_has_its_pieces_of_the_sequences():
    meshes = {"all": {"fsdp": 4}, "columns": {"fsdp": 2, "tensor": 2}, "tokens": {"fsdp": 2, "context": 2}}
    fig, alt = mesh_maps(meshes)
    numbers = [[one.get_text() for one in ax.texts if one.get_text().isdigit()] for ax in fig.axes]
    assert numbers == [list("0123"), list("0123"), list("01102332")]
    assert "columns: 2 sequences at once" in alt
    plt.close(fig)
