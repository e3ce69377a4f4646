"""The model on a mesh as `jax.make_mesh` makes it, in a process of its own."""

from pathlib import Path

import pytest
from children import printed_by


@pytest.mark.slow
def test_the_model_and_its_attention_take_arrays_on_explicit_axes():
    printed_by(Path(__file__).parent / "explicit_axes.py")
