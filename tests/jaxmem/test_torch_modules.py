"""A torch module by its JAX view, against torch's own numbers. `make parity` runs what needs torch."""

import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem

# Not importorskip: by itself, torchax cannot be imported beside a new torch.
here = all(importlib.util.find_spec(name) for name in ("torch", "torchax"))
with_torch = pytest.mark.skipif(not here, reason="no torch and torchax here")


@pytest.mark.skipif(here, reason="torchax is here")
def test_says_what_to_install():
    with pytest.raises(ImportError, match="pip install torch torchax"):
        jaxmem.from_torch(object())


def two_layers(torch):
    class Model(torch.nn.Module):
        """Two layers that share a matrix, with a buffer, a mask, an update in place and integers."""

        def __init__(self, dropout=0.0):
            super().__init__()
            self.embed = torch.nn.Embedding(37, 24)
            self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(24, 3, 50, dropout) for _ in range(2))
            self.head = torch.nn.Linear(24, 37)
            self.head.weight = self.embed.weight
            # Not torch.linspace: transformers, once it has made a model, lets that leave the meta device.
            self.register_buffer("scale", torch.arange(24) / 23 + 0.5)

        def forward(self, ids_BT):
            x_BTD = self.embed(ids_BT) * self.scale
            mask_TT = torch.nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1])
            for layer in self.layers:
                x_BTD = x_BTD + layer(x_BTD.transpose(0, 1), src_mask=mask_TT).transpose(0, 1)
            return self.head(x_BTD)

    return Model


def loss_of(torch):
    def loss_fn(model, ids_BT):
        logits_BTV = model(ids_BT[:, :-1])
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())

    return loss_fn


@with_torch
def test_loss_and_gradients_are_torchs_own():
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    model, loss_fn = two_layers(torch)(), loss_of(torch)
    ids_BT = np.random.default_rng(0).integers(0, 37, (3, 14))
    theirs = loss_fn(model, torch.from_numpy(ids_BT))
    theirs.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    values = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}

    mine, shapes = jaxmem.from_torch(model, loss_fn)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(lambda v: (v.shape, v.dtype), values)
    loss, grads = jax.jit(jax.value_and_grad(mine))(values, jnp.asarray(ids_BT))
    np.testing.assert_allclose(loss, theirs.detach().numpy(), rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(grads[name], gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@with_torch
def test_module_on_meta_and_its_report():
    """Nothing is allocated, buffers without values stay, dropout leaves no tracer, and bytes are the parameters'."""
    torch = importlib.import_module("torch")
    with torch.device("meta"):
        model = two_layers(torch)(dropout=0.2).to(torch.bfloat16)
    loss_fn, shapes = jaxmem.from_torch(model, loss_of(torch))
    assert "head.weight" not in shapes and {s.dtype for s in shapes.values()} == {jnp.dtype("bfloat16")}
    ids_BT = jax.ShapeDtypeStruct((3, 14), jnp.int32)
    for _ in range(2):
        report = jaxmem.compile_report(jax.value_and_grad(loss_fn), shapes, ids_BT)
        ours = 2 * sum(p.numel() for p in model.parameters())
        assert report.argument_bytes == ours + 4 * 3 * 14
    assert "optimization_barrier" in str(jax.make_jaxpr(loss_fn)(shapes, ids_BT))


@with_torch
def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        jaxmem.from_torch(lambda x: x)
