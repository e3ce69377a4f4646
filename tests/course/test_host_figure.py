"""The figure of notebook 11's hosts: every row is drawn once above, and once with the host that holds it."""

import matplotlib.pyplot as plt
import pytest

from llamem_course.host_figure import hosts_drawn


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_row_is_in_the_array_and_with_one_host(hosts):
    fig, alt = hosts_drawn(hosts)
    words = [text.get_text() for text in fig.axes[0].texts]
    assert all(words.count(str(row)) == 2 for row in range(8))
    assert words.count("knows x.sum() = 28") == hosts and f"host {hosts - 1} rows" in alt
    plt.close(fig)
