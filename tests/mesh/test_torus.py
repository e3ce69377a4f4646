"""Mesh axes along the sides of slices of TPUs that are not here, as their own devices' places have it."""

import jax
import numpy as np
import pytest

from jaxmem.chips.names import chip_called
from llamem.llama import MeshShape
from llamem.mesh.torus import along_sides, route_over, side_lengths


def on(chip, **sizes):
    return jax.sharding.use_abstract_mesh(chip_called(chip).mesh(**sizes))


@pytest.mark.parametrize(
    ("chip", "sizes", "lengths", "sides"),
    [
        ("v5e:16x16", {"fsdp": 256}, (16, 16), 2),
        ("v6e:4x8", {"fsdp": 32}, (4, 8), 2),
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}, (4, 16), 2),
        ("v5e:16x16", {"fsdp": 16, "tensor": 16}, (16,), 1),
        ("v5p:4x4x8", {"fsdp": 128}, (4, 4, 8), 3),
        ("v5p:8x8x8", {"fsdp": 64, "tensor": 8}, (8, 8), 2),
        ("v5p:2x2x4", {"fsdp": 16}, (4, 4), 2),  # 2 x 2 chips are a ring
        ("v5p-8", {"fsdp": 4}, (4,), 1),
        ("v5e-8", {"fsdp": 8}, (8,), 2),  # JAX itself goes round them in a ring
        ("h100-8", {"fsdp": 8}, (8,), 1),
    ],
)
def test_an_axis_knows_along_which_sides_it_lies(chip, sizes, lengths, sides):
    mesh = MeshShape.of(sizes)
    with on(chip, **sizes):
        assert side_lengths(mesh, "fsdp") == lengths
        assert along_sides(mesh, ("fsdp",)) == sides


def test_the_stages_lead_from_every_device_to_every_other_one_and_one_side_is_one_stage():
    mesh = MeshShape(fsdp=32, context=8)
    with on("v5e:16x16", fsdp=32, context=8):
        route = route_over(mesh, ("fsdp", "context"))
    assert [(stage.axes, stage.parts) for stage in route.stages] == [(("fsdp",), 2), (("fsdp",), 16), (("context",), 8)]
    for stage in route.stages[:2]:
        groups = stage.groups or ()
        assert sorted(np.ravel(groups)) == list(range(32)) and {len(group) for group in groups} == {stage.parts}
    assert route.stages[2].groups is None
    assert len(route_over(mesh, ("fsdp", "context")).stages) == 1  # of this machine's own devices


def test_two_slices_of_as_many_chips_are_two_meshes():
    wide, long = (chip_called(name).mesh(fsdp=64) for name in ("v5p:4x4x4", "v5p:2x4x8"))
    assert wide != long and wide == chip_called("v5p:4x4x4").mesh(fsdp=64)
