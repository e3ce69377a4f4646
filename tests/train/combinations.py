"""Takes one step for each row of `test_combinations.py`, on eight simulated devices, and one that is plain, as JSON.

A process of its own, since a process has as many devices as it began with.
"""

import functools
import json
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402
from adapters import MIXED, adapters_of  # noqa: E402
from models import SMALL, model_of, tokens_of  # noqa: E402
from norms import errors_by_name  # noqa: E402
from test_combinations import ROWS, Row  # noqa: E402

from llamem import Plan, TrainSettings  # noqa: E402
from llamem.mesh.mesh_step import batch_spec  # noqa: E402
from llamem.mesh.specs import shardings  # noqa: E402
from llamem.quantized import dequantize, quantize  # noqa: E402
from llamem.quantized.blocks import BlockKind  # noqa: E402
from llamem.runs.step_of_plan import place_of  # noqa: E402
from llamem.runs.weights_or_adapters import trained_adapters, trained_weights  # noqa: E402
from llamem.train.settings import Clip  # noqa: E402

CONFIG = SMALL.replace(vocab_size=324, d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96)
IDS = np.array([2, 0, 2, 1, 0, 0, 2, 2], np.int32)
B, T = len(IDS), 16


def plan_of(row: Row, plain: bool) -> Plan:
    changes: dict[str, Any] = {} if plain else {"loss_tiles": 3, **row.plan}
    return Plan(**changes)


def stepped(row: Row, *, plain: bool) -> tuple[Any, dict[str, Any]]:
    """The moments after a step as the row says, or on one device, over the numbers of its blocks; and its metrics."""
    config = CONFIG.replace(tied_head=row.tied)
    model, plan = model_of(config, scale=1.0), plan_of(row, plain)
    if row.blocks:
        model = quantize(model, row.blocks)
        model = dequantize(model) if plain else model
    settings = TrainSettings(
        batch_size=B,
        seq_len=T,
        clip_norm=0.1,
        clip=row.clip,
        accumulate=1 if plain else row.accumulate,
    )
    tokens = np.asarray(tokens_of(config, T=T + 1, B=B))
    batch = tokens[:, :-1], tokens[:, 1:]
    if row.trained == "weights":
        trained = trained_weights(config, settings, place_of(plan), model)
    else:
        # Larger adapters' attention would multiply every rounding a hundredfold.
        trained = trained_adapters(config, settings, place_of(plan), model, adapters_of(config, MIXED, size=0.03))
        batch = *batch, IDS
    if plan.mesh.devices > 1:
        batch = jax.device_put(batch, shardings(batch_spec(plan.mesh), plan.mesh))
    state = trained.begin()
    state, metrics = trained.compile(state, batch)[0](state, batch)
    return jax.tree.map(np.asarray, state.opt_state), jax.tree.map(np.asarray, metrics)


@functools.cache
def plain_step(trained: str, blocks: BlockKind | None, tied: bool, clip: Clip) -> tuple[Any, dict[str, Any]]:
    return stepped(Row(trained, blocks, tied, {}, clip=clip), plain=True)


def main() -> None:
    seen = {}
    for name, row in ROWS.items():
        expected, got = plain_step(row.trained, row.blocks, row.tied, row.clip), stepped(row, plain=False)
        leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(expected)]
        seen[name] = {
            "errors": errors_by_name(got, expected),
            "without a gradient": [leaf_name for leaf_name, leaf in leaves if not np.any(leaf)],
        }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
