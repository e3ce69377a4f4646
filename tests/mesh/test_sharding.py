import jax
import pytest
from flax import nnx
from models import VARIANTS

from llamem import Llama, Plan
from llamem.llama import MeshShape
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.mesh.specs import check_devices, device_mesh, parameter_specs
from llamem.mesh.split_weights import split

EVERY = MeshShape(data=2, fsdp=2, tensor=2, context=2)


def specs_of(config, mesh):
    state = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return nnx.to_pure_dict(parameter_specs(state, mesh))


def test_every_parameter_of_every_variant_is_in_the_table():
    seen = set()
    for config in VARIANTS.values():
        state = nnx.state(nnx.eval_shape(lambda config=config: Llama(config, rngs=nnx.Rngs(0))))
        for path, leaf in jax.tree.leaves_with_path(state):
            name = parameter_name(path)
            assert name is not None and len(PARAMETERS[name]) <= leaf.ndim, path
            seen.add(name)
    assert seen == set(PARAMETERS)


@pytest.mark.parametrize(
    ("config", "mesh", "says"),
    [
        ({"n_kv_heads": 1}, {"tensor": 2}, "wk: its axis 'kv_heads' of 1 does not divide among 2 devices"),
        ({"d_model": 24}, {"fsdp": 16}, "'d_model' of 24 does not divide among 16 devices .fsdp=16"),
        ({"d_model": 24}, {"fsdp": 4, "context": 4}, "16 devices .fsdp=4 x context=4"),
        ({"vocab_size": 101}, {"tensor": 2}, "embedding: its axis 'vocab' of 101"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(config, mesh, says):
    config = VARIANTS["tied"].replace(**{"vocab_size": 96, **config})
    with pytest.raises(ValueError, match=says):
        specs_of(config, MeshShape.of(mesh))


def test_a_plan_with_a_mesh_compares_and_hashes_by_what_it_means():
    one = Plan(mesh={"fsdp": 4, "data": 1})
    assert one == Plan(mesh=MeshShape(fsdp=4)) and hash(one) == hash(Plan(mesh={"fsdp": 4}))
    assert one.replace(mode="unroll").mesh == MeshShape(fsdp=4)
    assert Plan().mesh == MeshShape() and MeshShape().devices == 1 and one.mesh.axes == {"fsdp": 4}
    assert EVERY.over("batch", "sequence") == ("data", "fsdp", "context")


def test_a_device_s_part_outside_of_its_mesh_says_so():
    model = Llama(VARIANTS["tied"], rngs=nnx.Rngs(0), plan=Plan(mesh={"fsdp": 2}))
    with pytest.raises(ValueError, match="computed outside of it"):
        split(model, model.plan.mesh)
    assert model.hidden(jax.numpy.zeros((2, 8), int)).shape == (2, 8, 24), "the whole model computes where it lies"


def test_a_mesh_without_its_devices_leaves_the_sharing_to_the_program():
    """As one with them does, whatever JAX takes where nobody says it: "explicit" axes since 0.12."""
    mesh = device_mesh(MeshShape(fsdp=4096, tensor=2))
    assert dict(mesh.shape)["fsdp"] == 4096 and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    with pytest.raises(ValueError, match="has 4096 devices, and there are"):
        check_devices(MeshShape(fsdp=4096))
