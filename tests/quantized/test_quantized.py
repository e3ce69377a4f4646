"""Weights in blocks: `gguf`'s numbers, the loss and gradients of the numbers themselves, and never a whole stack."""

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_models import model_file
from models import SMALL, model_of
from norms import errors_by_name

import jaxmem
import llamem
from jaxmem.compiling import matmul_flops
from llamem.adapters import Adapters
from llamem.adapters.lora_step import losses_and_grads
from llamem.files.gguf import GgufTensor
from llamem.quantized import check_trainable, dequantize, quantize
from llamem.quantized.blocks import KINDS, dequantize_rows, quantize_rows
from llamem.runs import place_of
from llamem.train import TrainSettings

CONFIG = SMALL.replace(d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96)
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
untyped: Any = llamem.quantized  # for what is wrong on purpose
KEPT = {"wq": "q4_0", "wk": "q4_1", "wv": "q4_1", "wo": "q8_0", "w_gate": "q8_0", "w_up": "q4_1", "w_down": "q8_0"}


def rows_of(rng, *shape):
    """Blocks of very different sizes, one of zeros, one of one sign."""
    rows = rng.standard_normal(shape) * np.exp(rng.uniform(-8, 4, (*shape[:-1], shape[-1] // 32)).repeat(32, -1))
    rows[..., 0, :32] = 0
    rows[..., 1, :32] = np.abs(rows[..., 1, :32])
    return rows.astype(np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_gguf(kind):
    rows, type_ = rows_of(np.random.default_rng(0), 37, 160), gguf.GGMLQuantizationType[kind.upper()]
    raw = gguf.quants.quantize(rows, type_)
    mine, theirs = quantize_rows(jnp.asarray(rows), kind), _tensor(raw, type_, rows.shape).blocks(kind)
    assert sorted(mine) == sorted(theirs)
    for name in ("scale", "minimum"):
        if name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=2e-3)
    assert np.mean(np.asarray(mine["values"]) != theirs["values"]) < 1e-3, "ties may round to either side"
    values, scale = jnp.asarray(theirs["values"]), jnp.asarray(theirs["scale"])
    minimum = jnp.asarray(theirs["minimum"]) if "minimum" in theirs else None
    numbers = dequantize_rows(kind, values, scale, minimum, jnp.float32)
    np.testing.assert_array_equal(numbers, gguf.quants.dequantize(raw, type_))
    for dtype in (jnp.bfloat16, jnp.float16):  # rounded once
        rounded = dequantize_rows(kind, values, scale, minimum, dtype)
        np.testing.assert_array_equal(rounded, numbers.astype(dtype))


def _tensor(raw, type_, shape):
    field = gguf.gguf_reader.ReaderField(0, "t")
    return GgufTensor(gguf.gguf_reader.ReaderTensor("t", type_, np.array(shape[::-1]), 0, 0, 0, raw, field), 0)


@pytest.mark.filterwarnings("ignore:.*blocks were changed into kinds computed here")
def test_a_file_s_blocks_stay_as_they_are(tmp_path):
    """Types of every kind, stacks of several, rows of q and k in llama.cpp's order; 256 numbers share a super-block."""
    config = CONFIG.replace(d_model=256, head_dim=64, d_ff=512)
    types = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": ("Q4_0", "Q4_1", "Q4_K"), "attn_output": "Q8_0"}
    types |= {"ffn_gate": ("Q4_K", "Q6_K", "Q4_1"), "ffn_up": "Q4_K", "ffn_down": ("Q8_0", "Q6_K", "Q4_0")}
    file = model_file(tmp_path / "m.gguf", model_of(config), types | {"token_embd": "Q8_0"})
    with pytest.warns(UserWarning, match=r"w_gate from Q4_1 and Q4_K and Q6_K into q8_0"):
        blocks = llamem.load_pretrained(file, compute_dtype=jnp.float32)
    numbers = llamem.load_pretrained(file, dtype=jnp.float32)
    assert {name: getattr(blocks.blocks, name).kind for name in KEPT} == KEPT
    got, expected = (nnx.to_pure_dict(nnx.state(model)) for model in (dequantize(blocks), numbers))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        changed = {"w_gate": 6e-3, "w_down": 6e-3, "w_up": 1e-3, "wv": 1e-3}.get(path[-1].key, 0)
        assert np.linalg.norm(a - b) <= changed * np.linalg.norm(b), (path, np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("kind", "config"), [("q4_0", CONFIG), ("q4_1", CONFIG), ("q8_0", CONFIG)], ids=KINDS)
def test_quantize_there_and_back(config, kind, tmp_path):
    model = model_of(config)
    small = quantize(model, kind)
    again = quantize(dequantize(small), kind)
    bits = {"q4_0": 4.5, "q4_1": 5.0, "q8_0": 8.5}[kind]
    matrices = jax.tree.leaves(nnx.state(small.blocks, lambda path, _: path[-1] in ("values", "scale", "minimum")))
    numbers = sum(np.prod(getattr(model.blocks, name).shape) for name in KEPT)
    assert sum(leaf.nbytes for leaf in matrices) * 8 == bits * numbers
    for name in KEPT:
        one, two = (getattr(m.blocks, name).dequantize(jnp.float32) for m in (small, again))
        w = getattr(model.blocks, name)[...]
        assert one.shape == w.shape and np.linalg.norm(one - w) < {"q8_0": 0.01}.get(kind, 0.12) * np.linalg.norm(w)
        np.testing.assert_allclose(two, one, atol=np.abs(w).max() * {"q8_0": 1e-2}.get(kind, 0.1))
    folder = llamem.save_pretrained(model, tmp_path / "m")
    loaded = llamem.load_pretrained(folder, quantize=kind)  # one tensor after the other: the same blocks
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (loaded, small)))


def gradients(model, adapters, batch):
    """Loss and gradients of adapters over a model, by one program."""
    graphdef, base = nnx.split(model)
    settings = TrainSettings(batch_size=len(batch[0]), seq_len=batch[0].shape[1])
    return jax.jit(lambda base: losses_and_grads(place_of(model.plan), graphdef, settings, base, adapters, batch))(base)


@pytest.mark.usefixtures("as_a_user")
def test_what_has_no_blocks_or_only_blocks_is_refused(tmp_path):
    model = model_of(SMALL)
    folder = llamem.save_pretrained(model, tmp_path / "m")
    for call in (lambda: quantize(model, "q4_0"), lambda: llamem.load_pretrained(folder, quantize="q4_0")):
        with pytest.raises(ValueError, match=r"32 numbers .*wq has 24, wk has 24, .*w_down has 40"):
            call()
    one = Adapters.create(CONFIG, llamem.LoraConfig(ranks=(1,)), rngs=nnx.Rngs(0))
    small = quantize(model_of(CONFIG), "q8_0")
    for call, words in (
        (lambda: untyped.quantize(model, "q3"), r"quantize='q3': expected one of 'q4_0', 'q4_1', 'q8_0'"),
        (lambda: quantize(small, "q4_0"), "quantised already"),
        (lambda: llamem.save_pretrained(small, tmp_path / "s"), r"pass llamem.quantized.dequantize\(model\)"),
        (lambda: check_trainable(small), "have no gradient: it can carry adapters"),
        (lambda: llamem.merge_adapter(small, one, 0), "dequantize"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize(
    "chip",
    [pytest.param("v5e-1", marks=pytest.mark.tpu_compile), pytest.param("t4", marks=pytest.mark.gpu_compile)],
)
def test_no_program_holds_a_dequantised_stack(chip):
    """Read from the buffers of a step of four layers of Llama 3.1 8B: beside the inputs, no more than one matrix."""
    dtype = jnp.float16 if chip == "t4" else jnp.bfloat16
    compute = {"param_dtype": dtype, "compute_dtype": dtype}
    config = llamem.LlamaConfig.from_name("llama3.1-8b", n_layers=4, vocab_size=4096, **compute)
    settings, lora = TrainSettings(batch_size=1, seq_len=512), llamem.LoraConfig(ranks=(16,))
    step, *shapes = llamem.abstract_lora_step(config, settings, llamem.Plan(), lora, quantize="q4_0")
    report = jaxmem.compile_report(step, *shapes, donate_argnums=(0,), chip=chip)
    matrix = 4096 * 14_336 * 2
    assert report.temp_bytes < 5 * matrix, report  # of four layers there are twelve of this size
    assert all(buffer.bytes <= matrix for buffer in report.buffers if "argument" not in buffer.operation), (
        report.buffers
    )
    assert report.argument_bytes < 4 * (218e6 * 4.5 / 8) + 2 * 2 * 4096 * 4096 + 3 * 4 * 4 * 3e6
    # Blocks are no products, and the loss over a frozen head takes two.
    plain = llamem.abstract_lora_step(config, settings, llamem.Plan(), lora)
    wider = llamem.abstract_lora_step(config.replace(vocab_size=2 * 4096), settings, llamem.Plan(), lora)
    flops = [matmul_flops(jax.make_jaxpr(fn)(*args).jaxpr) for fn, *args in ((step, *shapes), plain, wider)]
    assert flops[0] == flops[1] and flops[2] - flops[1] == 2 * 2 * 512 * 4096 * 4096


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
@pytest.mark.parametrize(("chip", "gib"), [("v5e-1", 10.3), ("t4", 10.5), ("l4", 10.6)])
def test_8b_over_four_bits_on_small_chips(chip, gib):
    """Compiled to code: adapters of rank 16 on all seven matrices, AdamW, 8,192 tokens, nothing on the host."""
    dtype = jnp.float16 if chip == "t4" else jnp.bfloat16
    config = llamem.LlamaConfig.from_name("llama3.1-8b", param_dtype=dtype, compute_dtype=dtype)
    settings, lora = TrainSettings(batch_size=1, seq_len=8192), llamem.LoraConfig(ranks=(16,))
    step, *shapes = llamem.abstract_lora_step(config, settings, llamem.Plan(), lora, quantize="q4_0")
    report = jaxmem.compile_report(step, *shapes, donate_argnums=(0,), chip=chip, depth="code")
    assert report.fits and report.peak_bytes < gib * 2**30 and not report.host_bytes, report


def problem(tokenizer, config):
    """Adapters that are not zero, and one chat with the loss on its answer."""
    ids, wrote = tokenizer.chat(CHAT)
    inputs = jnp.asarray(ids[None, :-1], jnp.int32)
    batch = inputs, jnp.asarray(np.where(wrote, ids.astype(int), -100)[None, 1:]), jnp.zeros(1, jnp.int32)
    adapters = Adapters.create(config, llamem.LoraConfig(ranks=(4,)), rngs=nnx.Rngs(0))
    adapters = adapters.with_weights(jax.tree.map(lambda x: x + 0.003, adapters.weights))
    return adapters, batch


def test_the_real_model_in_its_own_four_bits(smollm2, smollm2_blocks, smollm2_tokenizer):
    """Loss and every gradient of its adapters as over the dequantised numbers; the same answer."""
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(smollm2_blocks.blocks))) < 64 * 2**20
    given = problem(smollm2_tokenizer, smollm2.config)
    (metrics, grads), (expected, wanted) = gradients(smollm2_blocks, *given), gradients(smollm2, *given)
    assert expected["loss"][0] < 3 and expected["tokens"][0] == 8
    # On some processors the two programs' products are summed in another order, through thirty layers.
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-5)
    errors = errors_by_name(grads, wanted)
    assert max(errors.values()) <= 5e-5 and all(np.any(w) for w in jax.tree.leaves(wanted)), errors
    prompt = smollm2_tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    answer = llamem.generate(smollm2_blocks, jnp.asarray([prompt]), 8, temperature=0)[0]
    assert smollm2_tokenizer.decode(np.asarray(answer)) == "The capital of France is Paris.<|im_end|>"
