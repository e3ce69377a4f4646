"""Loads a folder onto eight CPU devices as a plan says, compares logits with stored ones, evaluates and writes."""

import sys

import jax
import numpy as np
from flax import nnx

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import llamem  # noqa: E402
from llamem.llama import MeshShape  # noqa: E402
from llamem.mesh.specs import parameter_specs  # noqa: E402
from llamem.runs import loss_fn  # noqa: E402


def main(folder: str, expected: str) -> None:
    mesh = MeshShape(fsdp=2, tensor=2)
    graphdef, params = nnx.split(llamem.load_pretrained(folder, plan=llamem.Plan(mesh=mesh)))
    specs = parameter_specs(params, mesh)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert leaf.sharding.spec == spec
        over = [axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)]
        assert parts == np.prod([mesh.axes[axis] for axis in over])
    tokens, logits = np.load(expected).values()
    loss = jax.jit(loss_fn, static_argnums=0)(graphdef, params, tokens[:, :-1], tokens[:, 1:])
    rows = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    wanted = -np.take_along_axis(rows, tokens[:, 1:, None], 2).mean()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    text = llamem.generate(nnx.merge(graphdef, params), tokens[:, :5], 1, temperature=0)
    assert (np.asarray(text)[:, -1] == np.argmax(logits[:, 4], -1)).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
