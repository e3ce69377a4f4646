"""Adapters against PEFT over transformers, on models made on the spot. `make parity` runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from make_golden import make, tokens_of

import llamem
from llamem import TrainSettings
from llamem.adapters.lora_step import losses_and_grads
from llamem.runs.step_of_plan import place_of

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.numpy")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "attention": {"r": 3, "lora_alpha": 7, "target_modules": [*ATTENTION, "lm_head"]},
    "all linear": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "everything": {"r": 3, "lora_alpha": 7, "target_modules": [*LINEAR, "lm_head"]},
    "rank stabilised, one layer": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["v_proj"],
        "layers_to_transform": [1],
    },
}


def theirs(name, kind, folder, seed):
    """A transformers model with a PEFT adapter, both matrices random; the model's folder and the adapter's."""
    base = make(name, folder / "base", seed=seed)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **KINDS[kind]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "lora_" in tensor_name:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama31", kind) for kind in KINDS] + [("qwen3", "everything"), ("llama32", "all linear")],
)
def test_outputs_gradients_and_folders_of_peft(tmp_path, name, kind):
    model = theirs(name, kind, tmp_path, seed=3)
    mine = llamem.load_pretrained(tmp_path / "base")
    adapters = llamem.load_adapters(mine, tmp_path / "adapter")
    tokens = tokens_of(2)
    ids = torch.from_numpy(tokens)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    expected = out.logits.detach().numpy()
    got = np.asarray(adapters.on(mine)(jnp.asarray(tokens)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    graphdef, base = nnx.split(mine)
    batch = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.zeros(2, jnp.int32)
    gradients = jax.jit(lambda *args: losses_and_grads(place_of(mine.plan), graphdef, TrainSettings(), *args))
    metrics, grads = gradients(base, adapters, batch)
    assert abs(metrics["loss"][0] - out.loss.item()) < 1e-5 * out.loss.item()
    # Written as an adapter, gradients get the names of the tensors that they belong to.
    folder = llamem.save_adapter(adapters.with_weights(grads), 0, tmp_path / "gradients")
    held = safetensors.load_file(folder / "adapter_model.safetensors")
    found = {n.replace(".default", ""): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
    assert set(held) == set(found)
    for tensor_name, gradient in found.items():
        assert np.abs(gradient).max() > 0
        assert np.linalg.norm(held[tensor_name] - gradient) < 1e-4 * np.linalg.norm(gradient), tensor_name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["everything", "rank stabilised, one layer"])
def test_peft_reads_what_is_written_here_and_merges_the_same(tmp_path, kind):
    model = theirs("llama31", kind, tmp_path, seed=5)
    mine = llamem.load_pretrained(tmp_path / "base")
    adapters = llamem.load_adapters(mine, tmp_path / "adapter")
    folder = llamem.save_adapter(adapters, 0, tmp_path / "mine", base=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(make("llama31", tmp_path / "same", seed=5), folder)
    ids = torch.from_numpy(tokens_of(4))
    with torch.no_grad():
        expected, got = model(ids).logits.numpy(), again(ids).logits.numpy()
        merged = model.merge_and_unload()(ids).logits.numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    logits = llamem.merge_adapter(mine, adapters, 0)(jnp.asarray(tokens_of(4)))
    np.testing.assert_allclose(logits, merged, rtol=1e-4, atol=1e-4 * np.abs(merged).max())
