"""The figures of notebook 11: every row is drawn once above, and once with its host; every chip has its parts."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from llamem_course.host_figure import hosts_drawn, meshes_drawn


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_row_is_in_the_array_and_with_one_host(hosts):
    fig, alt = hosts_drawn(hosts)
    words = [text.get_text() for text in fig.axes[0].texts]
    assert all(words.count(str(row)) == 2 for row in range(8))
    assert words.count("knows x.sum() = 28") == hosts and f"host {hosts - 1} rows" in alt
    plt.close(fig)


def test_of_three_meshes_each_chip_has_its_eighth_and_its_tokens():
    fig = meshes_drawn()
    filled = [[patch for patch in ax.patches if to_rgba(patch.get_facecolor())[3] == 1.0] for ax in fig.axes]
    own, tokens = 8, {"fsdp": 8 * 8, "tensor": 8 * 8, "context": 8}
    assert [len(patches) for patches in filled] == [own + count for count in tokens.values()]
    pale = [sum(patch.get_alpha() == 0.3 for patch in ax.patches) for ax in fig.axes]
    assert pale == [8 * 7, 0, 8 * 7]  # what is gathered: all but a chip's own
    plt.close(fig)
