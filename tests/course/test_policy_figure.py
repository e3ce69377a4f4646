"""The picture of what each name costs and spares: areas are shares, and the dot stands where the first has half."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from llamem_course.policy_figure import shares


def test_areas_are_shares_and_the_dot_stands_on_the_edge_of_the_first():
    lengths = np.geomspace(16, 256, 9)
    fig, alt = shares(lengths, {"wide": 12, "tall": 4}, {"tall": 4 * lengths, "wide": 12 * 16}, half=48)
    bar, areas = fig.axes
    np.testing.assert_allclose([one.get_height() for one in bar.patches if isinstance(one, Rectangle)], [25, 75])
    edge = np.array(areas.collections[0].get_paths()[0].vertices)
    for length, share in ((16, 25), (256, 84.21)):  # 4 x 16 of 4 x 16 + 12 x 16; 4 x 256 of 4 x 256 + 12 x 16
        assert np.isclose(edge[np.isclose(edge[:, 0], length), 1].max(), share, atol=0.01)
    np.testing.assert_allclose(np.ravel(areas.lines[0].get_xydata()), [48, 50])
    assert "tall 25%, wide 75%" in alt and "25% at 16 tokens of a sequence, half at 48, 84% at 256" in alt
    plt.close(fig)
