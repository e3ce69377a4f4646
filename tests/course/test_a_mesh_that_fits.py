"""Meshes for notebook 11's second exercise that need more than a chip has, by the TPU's compiler."""

import pytest

from llamem_course.exercises import n11_scale_out


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("mesh", "hint"),
    [
        ({"fsdp": 64}, "what else does a chip hold"),
        ({"fsdp": 16, "tensor": 4}, "which axis splits that"),
        ({"data": 2, "fsdp": 8, "context": 4}, "held whole by each part"),
    ],
)
def test_a_mesh_that_needs_too_much_is_refused(mesh, hint):
    with pytest.raises(AssertionError, match=hint):
        n11_scale_out.check_mesh(lambda: mesh)
