"""The losses on eight devices, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_way_to_divide_them_on_eight_devices():
    script = Path(__file__).parent / "mesh_losses.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
