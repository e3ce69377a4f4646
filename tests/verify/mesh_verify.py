"""Proves layers whose weights and batch are shared out over eight CPU devices, and what breaks there too."""

import sys
from functools import partial

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
from broken import a_lost_gradient  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from models import model_of, tokens_of  # noqa: E402
from programs import KEYS, WEIGHTS, L, X, dropout, layer, scanned, with_dropout  # noqa: E402

import jaxmem  # noqa: E402
import llamem  # noqa: E402
from jaxmem.verify.proofs import PROOFS  # noqa: E402
from llamem.runs import loss_fn  # noqa: E402

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def share(array, *axes):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*axes)))


def seen_of(verification):
    return {proof.name: proof for proof in verification.proofs}


def mapped(loss, w, x, *keys, check_vma):
    """A mean over eight devices, each with its rows of x, and its key."""
    spec = PartitionSpec

    def local(w, x, *keys):
        return jax.lax.pmean(loss(w, x, *(key[0] for key in keys)), ("data", "model"))

    rows = (spec(("data", "model")),) * (1 + len(keys))
    return jax.shard_map(local, mesh=MESH, in_specs=(spec(), *rows), out_specs=spec(), check_vma=check_vma)(w, x, *keys)


def inside_shard_map(check_vma: bool) -> None:
    x, options = jnp.tile(X, (64, 1)), {"remat": True, "baseline": False}

    def right(w, x, how):
        return mapped(lambda w, x: scanned(jax.checkpoint(layer) if how else layer, w, x), w, x, check_vma=check_vma)

    def kept(w, x, how):
        keep = jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)
        return mapped(lambda w, x: scanned(keep if how else layer, w, x), w, x, check_vma=check_vma)

    def around(w, x, how):
        def whole(w, x):
            return scanned(layer, w, x)

        return mapped(jax.checkpoint(whole) if how else whole, w, x, check_vma=check_vma)

    verification = jaxmem.verify_remat(right, WEIGHTS, x, **options)
    assert verification.holds and all(proof.holds for proof in verification.proofs), verification
    seen = seen_of(verification)
    assert seen["the layer runs again in the backward pass"].seen.startswith(f"{L} products"), verification
    # Every product of the layer again, on every device, and nothing else.
    left, asked = (
        int(word.replace(",", "")) for word in seen["the compiler leaves them"].seen.split() if word[0].isdigit()
    )
    assert 0.9 < left / asked < 1.1, seen["the compiler leaves them"]
    failed = [proof.name for proof in jaxmem.verify_remat(kept, WEIGHTS, x, **options).failed]
    assert "the layer runs again in the backward pass" in failed, failed
    failed = [proof.name for proof in jaxmem.verify_remat(around, WEIGHTS, x, **options).failed]
    assert failed == ["memory falls"], failed


def draws_inside_shard_map() -> None:
    """Keys are followed there: each device needs its own where its data are its own."""

    def loss(w, batch, how, own=True):
        def local(w, x, key):
            def body(wk, x):
                return dropout(wk[0], x, wk[1])

            return scanned(jax.checkpoint(body) if how else body, (w, jax.random.split(key, L)), x)

        keys = jax.random.split(batch["key"], 8) if own else jnp.stack([batch["key"]] * 8)
        return mapped(local, w, batch["x"], keys, check_vma=False)

    def replicated(w, batch, how):
        spec = PartitionSpec

        def local(w, x, key):
            return jax.lax.pmean(scanned(lambda w, x: dropout(w, x, key), w, x), "data")

        specs = {"in_specs": (spec(), spec("data"), spec()), "out_specs": spec()}
        return jax.shard_map(local, mesh=MESH, check_vma=False, **specs)(w, batch["x"], batch["key"])

    batch = {"x": jnp.tile(X, (8, 1)), "key": KEYS[7]}
    fresh = jaxmem.Title.RANDOMNESS
    skip = {title for title in PROOFS if title != fresh}
    for fn, right in [(loss, True), (partial(loss, own=False), False), (replicated, False)]:
        verification = jaxmem.verify_remat(fn, WEIGHTS, batch, remat=True, baseline=False, skip=skip)
        (proof,) = [proof for proof in verification.proofs if proof.name == fresh]
        assert proof.holds is right, (fn, str(verification))


def the_model_with_a_mesh() -> None:
    config = llamem.LlamaConfig(
        vocab_size=96, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_seq_len=128
    )
    params = nnx.state(model_of(config))
    tokens = tokens_of(config, T=97, B=8)
    for sizes in ({"fsdp": 4, "tensor": 2}, {"data": 2, "context": 4}):

        def loss(params, tokens_BT, remat, sizes=sizes, training=True):
            plan = llamem.Plan(mesh=sizes, remat=remat, loss_tiles=2)
            model = nnx.eval_shape(lambda: llamem.Llama(config, rngs=nnx.Rngs(0), plan=plan))
            model.train() if training else model.eval()
            return loss_fn(nnx.graphdef(model), params, tokens_BT[:, :-1], tokens_BT[:, 1:])

        evaluate = partial(loss, training=False)
        verification = jaxmem.verify_remat(loss, params, tokens, evaluate=evaluate)
        assert verification.holds, verification
        seen = seen_of(verification)
        assert all(proof.holds for name, proof in seen.items() if name != "memory falls"), verification
        still_training = jaxmem.verify_remat(loss, params, tokens, evaluate=loss)
        assert "evaluation is untouched" in [proof.name for proof in still_training.failed]


def main(which: str = "layers") -> None:
    assert len(jax.devices()) == 8
    if which == "models":
        the_model_with_a_mesh()
        return
    for check_vma in (False, True):
        inside_shard_map(check_vma)
    w = {"up": share(WEIGHTS["up"], None, "data", "model"), "down": share(WEIGHTS["down"], None, "model", "data")}
    batch = {"x": share(jnp.tile(X, (8, 1)), "data"), "key": KEYS[7]}
    verification = jaxmem.verify_remat(with_dropout, w, batch)
    assert verification.holds, verification
    draws_inside_shard_map()
    assert [proof.name for proof in jaxmem.verify_remat(a_lost_gradient, w, batch["x"]).failed] == [
        "every gradient is the same"
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
