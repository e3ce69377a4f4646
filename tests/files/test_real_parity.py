"""A real model against transformers, which reads the same GGUF by itself, and the folders of runs. `make parity`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import llamem
from llamem.adapters import Adapters
from llamem.files import smollm2_file
from llamem.runs import Run, loss_fn

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]


@pytest.fixture(scope="module")
def theirs():
    file = smollm2_file()
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(smollm2_tokenizer):
    return np.asarray(smollm2_tokenizer.chat(CHAT)[0], np.int64)[None]


def test_logits_loss_and_gradients(smollm2, theirs, ids):
    out = theirs(torch.from_numpy(ids), labels=torch.from_numpy(ids))
    out.loss.backward()
    expected = out.logits.detach().numpy()
    got = smollm2(jnp.asarray(ids))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    graphdef, params = nnx.split(smollm2)
    inputs, targets = jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:])
    loss, grads = jax.jit(jax.value_and_grad(lambda params: loss_fn(graphdef, params, inputs, targets)))(params)
    assert abs(loss - out.loss.item()) < 1e-5 * out.loss.item()
    tensors = dict(theirs.named_parameters())
    blocks = grads["blocks"]
    pairs = {
        "model.embed_tokens.weight": grads["embedding"][...],
        "model.norm.weight": grads["norm"][...],
        "model.layers.0.mlp.down_proj.weight": blocks["w_down"][...][0].T,
        "model.layers.29.mlp.up_proj.weight": blocks["w_up"][...][29].T,
        "model.layers.7.post_attention_layernorm.weight": blocks["mlp_norm"][...][7],
    }
    for name, gradient in pairs.items():
        wanted, gradient = tensors[name].grad.numpy(), np.array(gradient)
        if "embed" in name:  # PyTorch's embedding gives the row of its padding token no gradient
            wanted[theirs.config.pad_token_id] = gradient[theirs.config.pad_token_id] = 0
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(gradient - wanted) < 1e-3 * np.linalg.norm(wanted), name


def test_the_folders_of_a_run(smollm2, smollm2_tokenizer, theirs, ids, tmp_path):
    """Its weights and its tokenizer by transformers, its adapters over them by peft: the same numbers and ids."""
    folder = Run(smollm2, [], True).save(tmp_path / "weights", smollm2_tokenizer)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, a), (same, b) in zip(theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == same and torch.equal(a, b), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == ids[0].tolist()

    adapters = Adapters.create(smollm2.config, llamem.LoraConfig(ranks=(4,)), rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    weights = jax.tree.map(lambda x: x + 0.01 * jax.random.normal(next(keys), x.shape), adapters.weights)
    run = Run(smollm2, [], True, adapters.with_weights(weights), {"base": str(folder)})
    adapted = peft.PeftModel.from_pretrained(again, run.save(tmp_path / "adapters"))
    with torch.no_grad():
        expected = adapted(torch.from_numpy(ids)).logits.numpy()
    assert run.adapters is not None
    got = np.asarray(run.adapters.on(smollm2)(jnp.asarray(ids)))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert np.abs(got - np.asarray(smollm2(jnp.asarray(ids)))).max() > 0.1
