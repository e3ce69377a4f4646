"""Proves layers whose weights and batch are shared out over eight CPU devices, and what breaks there too."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
from gallery import lost_gradient  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from programs import KEYS, WEIGHTS, L, X, with_dropout  # noqa: E402

import llamem  # noqa: E402

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def share(array, *axes):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*axes)))


def main() -> None:
    assert len(jax.devices()) == 8
    w = {"up": share(WEIGHTS["up"], None, "data", "model"), "down": share(WEIGHTS["down"], None, "model", "data")}
    batch = {"x": share(jnp.tile(X, (8, 1)), "data"), "key": KEYS[7]}
    verification = llamem.verify_remat(with_dropout, w, batch)
    assert verification.holds, verification
    runs = next(proof.seen for proof in verification.proofs if "runs again" in proof.name)
    assert f"{L} runs of checkpointed functions, {L} again" in runs, runs
    assert [proof.name for proof in llamem.verify_remat(lost_gradient, w, batch["x"]).failed] == [
        "every gradient is the same"
    ]


if __name__ == "__main__":
    main()
