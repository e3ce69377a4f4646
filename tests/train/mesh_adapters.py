"""Adapters' losses and gradients on eight simulated devices against one device's; what was seen, as JSON."""

import dataclasses
import json

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from adapters import MIXED, adapters_of  # noqa: E402
from flax import nnx  # noqa: E402
from models import SMALL, model_of, tokens_of  # noqa: E402
from norms import errors_by_name  # noqa: E402

from llamem import Plan, TrainSettings, abstract_lora_step  # noqa: E402
from llamem.adapters import init_lora_state, make_lora_step  # noqa: E402

CONFIG = SMALL.replace(vocab_size=324, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=80)
IDS = np.array([2, 0, 2, 1, 0, 0, 2, 2])
SETTINGS = TrainSettings(batch_size=8, seq_len=16, clip_norm=0.1, learning_rate=1e-2)


def stepped(config, mesh, accumulate=1, mlp_tiles=1):
    """The state after a step, and its metrics, with every array where the abstract step says."""
    settings = dataclasses.replace(SETTINGS, accumulate=accumulate)
    plan = Plan(mesh=mesh, loss_tiles=3, mlp_tiles=mlp_tiles)
    base = nnx.state(model_of(config))
    tokens = tokens_of(config, T=17, B=8)
    adapters = adapters_of(config, MIXED, size=0.03)  # larger ones' attention multiplies every rounding a hundredfold
    args = init_lora_state(adapters, settings), base, (tokens[:, :-1], tokens[:, 1:], jnp.asarray(IDS))
    if mesh:
        _, *shapes = abstract_lora_step(config, settings, plan, MIXED)
        args = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), args, tuple(shapes))
    return jax.jit(make_lora_step(config, settings, plan))(*args)


def main():
    every = {"fsdp": 2, "tensor": 2, "context": 2}
    cases = {
        "all but data, untied": (CONFIG, every, {"mlp_tiles": 3}),
        "data, tied": (CONFIG.replace(tied_head=True), {"data": 4}, {"accumulate": 2}),
    }
    seen = {}
    for name, (config, mesh, how) in cases.items():
        (want, expected), (got, metrics) = stepped(config, {}), stepped(config, mesh, **how)
        seen[name] = {
            "errors": {**errors_by_name(got.opt_state, want.opt_state), **errors_by_name(metrics, expected)},
            "steps": np.asarray(got.step).tolist(),
        }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
