import jax
import pytest
from flax import nnx
from models import MOE, VARIANTS

from llamem import Llama, LlamaConfig, Plan
from llamem.llama.sharding import PARAMETERS, RULES, MeshShape, parameter_name, parameter_specs, partition_spec

EVERY = MeshShape(data=2, fsdp=2, tensor=2, context=2)


def specs_of(config, mesh):
    state = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return nnx.to_pure_dict(parameter_specs(state, mesh))


def test_every_parameter_of_every_variant_is_in_the_table():
    seen = set()
    for config in (*VARIANTS.values(), MOE):
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


def test_one_mesh_axis_on_two_axes_of_an_array_is_refused_by_name():
    rules = {**RULES, "heads": ("fsdp",)}
    with pytest.raises(ValueError, match=r"wq: its axes 'd_model' and 'heads' are both split over .* 'fsdp'"):
        partition_spec("wq", PARAMETERS["wq"], (16, 4, 8), MeshShape(fsdp=2), rules)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"mesh": {"model": 2}}, "no mesh axis is called 'model'. Known: data, fsdp, tensor, context"),
        ({"mesh": {"fsdp": 0}}, "'fsdp': 0.: expected a whole number"),
        ({"mesh": {"fsdp": 2.0}}, "'fsdp': 2.0.: expected a whole number"),
        ({"mesh": {"tensor": 2}, "loss_axis": "tokens"}, "vocabulary split over 'tensor'"),
        ({"mesh": {"context": 2}, "attention": "cudnn"}, "cuDNN computes whole sequences"),
    ],
)
def test_a_mesh_that_cannot_be_meant_is_refused_when_the_plan_is_made(plan, says, as_a_user):
    with pytest.raises(ValueError, match=says):
        Plan(**plan)


def test_a_plan_with_a_mesh_compares_and_hashes_by_what_it_means():
    one = Plan(mesh={"fsdp": 4, "data": 1})
    assert one == Plan(mesh=MeshShape(fsdp=4)) and hash(one) == hash(Plan(mesh={"fsdp": 4}))
    assert one.replace(mode="unroll").mesh == MeshShape(fsdp=4)
    assert Plan().mesh == MeshShape() and MeshShape().devices == 1 and one.mesh.axes == {"fsdp": 4}
    assert EVERY.over("batch", "sequence") == ("data", "fsdp", "context")


def test_a_model_outside_of_its_mesh_says_so():
    config = LlamaConfig.from_name("tiny", vocab_size=64)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=Plan(mesh={"fsdp": 2})))
    with pytest.raises(ValueError, match="computed outside of it"):
        jax.eval_shape(lambda model: model.hidden(jax.numpy.zeros((2, 8), int)), model)


def test_a_mesh_without_its_devices_leaves_the_sharing_to_the_program():
    """As one with them does, whatever JAX takes where nobody says it: "explicit" axes since 0.12."""
    mesh = MeshShape(fsdp=4096, tensor=2).mesh()
    assert dict(mesh.shape)["fsdp"] == 4096 and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="has 4096 devices, and there are"):
        MeshShape(fsdp=4096).check_devices()
