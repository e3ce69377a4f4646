"""The losses on eight devices, in a process of their own."""

from pathlib import Path

import pytest
from children import printed_by


@pytest.mark.slow
def test_every_way_to_divide_them_on_eight_devices():
    printed_by(Path(__file__).parent / "mesh_losses.py")
