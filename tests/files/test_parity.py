"""Against transformers, on models made on the spot, in more shapes than tests/golden holds. `make parity` runs it."""

import datetime
import json

import jax.numpy as jnp
import numpy as np
import pytest
from make_golden import MODELS, make, numbers, tokens_of
from models import VARIANTS, model_of
from rope_spellings import NO_ROPE, READ
from templates import CHAT, PUBLISHED
from test_chat_messages import ASK, TOOL, TOOLS, WHOLE
from test_pretrained import assert_same_numbers

import llamem
from llamem.files import config_from_hf, smollm2_file
from llamem.text import Tokenizer
from llamem.text.chat_template import LLAMA3_TEMPLATE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPES = {
    "as stored": {},
    "mha": {"num_key_value_heads": 4},
    "one kv head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "tied the other way": {"tie_word_embeddings": None},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_number(tmp_path, name, shape):
    changes = dict(SHAPES[shape])
    if "tie_word_embeddings" in changes:
        changes["tie_word_embeddings"] = not MODELS[name][1]["tie_word_embeddings"]
    theirs = make(name, tmp_path / "theirs", seed=3, **changes)
    for options in ({"remat": "nothing"}, {"mode": "nested", "remat": "minimal", "attention": "tiled"}):
        mine = assert_same_numbers(tmp_path / "theirs", numbers(theirs, tokens_of(2)), **options)
    folder = llamem.save_pretrained(mine, tmp_path / "mine", max_shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for a, b in zip(theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


@pytest.mark.parametrize("name", ["llama31", "qwen3"])
def test_padding_and_packed_documents(tmp_path, name):
    theirs = make(name, tmp_path / "m", seed=4)
    mine = llamem.load_pretrained(tmp_path / "m")
    tokens = tokens_of(5)
    lengths = (11, 22, 7)
    segments = np.repeat(np.arange(3), lengths)
    places = np.concatenate([np.arange(n) for n in lengths])
    visible = (segments[:, None] == segments) & np.tri(40, dtype=bool)
    mask = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min).expand(2, 1, 40, 40)
    with torch.no_grad():
        packed = theirs(
            torch.from_numpy(tokens), attention_mask=mask, position_ids=torch.from_numpy(places)[None]
        ).logits
        padded = theirs(
            torch.from_numpy(tokens), attention_mask=torch.from_numpy((np.arange(40) < 31)[None] * np.ones((2, 1), int))
        ).logits
    segments_BT = jnp.broadcast_to(jnp.asarray(segments), (2, 40))
    for implementation in ("xla", "tiled"):
        mine.plan = mine.plan.replace(attention=implementation)
        got = np.asarray(mine(jnp.asarray(tokens), segments_BT))
        np.testing.assert_allclose(got, packed.numpy(), rtol=1e-4, atol=1e-4 * np.abs(packed.numpy()).max())
        got = np.asarray(mine(jnp.asarray(tokens), (jnp.arange(40) >= 31)[None].repeat(2, 0).astype(int)))[:, :31]
        np.testing.assert_allclose(got, padded.numpy()[:, :31], rtol=1e-4, atol=1e-4 * np.abs(padded.numpy()).max())


@pytest.fixture(scope="module", params=["llama3", "smollm2"])
def saved(request, tmp_path_factory):
    """A model and its tokenizer, saved by us: the folder, and the tokenizer that it was."""
    tokenizer = Tokenizer() if request.param == "llama3" else Tokenizer(smollm2_file())
    folder = tmp_path_factory.mktemp(request.param) / "m"
    llamem.save_pretrained(model_of(VARIANTS["untied"].replace(vocab_size=tokenizer.vocab_size, n_layers=1)), folder)
    return tokenizer.save(folder), tokenizer


def test_a_saved_tokenizer_is_the_same_in_transformers(saved):
    folder, tokenizer = saved
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    named = theirs.bos_token_id, theirs.eos_token_id, len(theirs)
    assert named == (tokenizer.bos_id, tokenizer.stop_ids[0], tokenizer.vocab_size)
    text = "I'LL pay $1234567 for\tünï-çødé  漢字\r\n\n  now..\n🦙 " + "".join(map(chr, range(1, 700)))
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    # What stands before a text is what `generate_text` puts there.
    assert theirs("Hi")["input_ids"] == tokenizer.encode("Hi", bos=True)
    assert theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"] == tokenizer.apply_chat_template(CHAT)
    assert theirs.convert_tokens_to_ids(list(tokenizer._special)) == list(tokenizer._special.values())
    generation = transformers.GenerationConfig.from_pretrained(folder)
    derived = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(folder))
    assert generation.eos_token_id == derived.eos_token_id == list(tokenizer.stop_ids)
    assert generation.bos_token_id == derived.bos_token_id == tokenizer.bos_id


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_template_writes_what_transformers_has_it_write(saved, form):
    folder, _ = saved
    template, taught = PUBLISHED[form]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    mine = Tokenizer(folder, chat_template=template, today=datetime.date.today())
    for messages, prompt in ((CHAT, False), (CHAT[:3], True), (CHAT[:1], True)):
        options = {"chat_template": template, "add_generation_prompt": prompt}
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = mine.apply_chat_template(messages, add_generation_prompt=prompt)
        assert mine.decode(ids) == text
        if len(messages) == 1:  # no answer that is encoded apart
            assert ids == theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
    if "{% generation %}" in template and isinstance(taught, list):
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
        marks = theirs.apply_chat_template(CHAT, **options)["assistant_masks"]
        assert mine.chat(CHAT)[1].tolist() == [bool(mark) for mark in marks]


@pytest.mark.parametrize("template", [WHOLE, LLAMA3_TEMPLATE], ids=["whole", "Llama 3"])
def test_tools_and_thoughts_are_written_as_transformers_writes_them(saved, template):
    folder, _ = saved
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    mine = Tokenizer(folder, chat_template=template)
    thought = [ASK, {"role": "assistant", "reasoning": "Two and two.", "content": "Four."}]
    for messages, tools in ((TOOLS, [TOOL]), (TOOLS[:3], [TOOL]), (TOOLS, None), (thought, None)):
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=template)
        assert mine.decode(mine.apply_chat_template(messages, tools=tools)) == text


@pytest.mark.parametrize("spelling", READ)
def test_rope_s_angles_are_those_that_transformers_reads(spelling):
    fields, _ = READ[spelling]
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps(NO_ROPE | fields))).rope_parameters
    config = config_from_hf(NO_ROPE | fields)
    kind = "default" if config.rope_scaling is None else "llama3"
    assert (theirs["rope_theta"], theirs["rope_type"]) == (config.rope_theta, kind)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        assert (theirs["factor"], theirs["low_freq_factor"], theirs["high_freq_factor"]) == (
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
        )


def test_a_template_s_surroundings_are_those_of_transformers(saved):
    folder, _ = saved
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "a<b & 'é'"}]
    for template in (
        "{% if tools is not none %}X{% endif %}{% if documents is not none %}X{% endif %}-",
        "{% if tools is defined %}X{% endif %}{% if unk_token is defined %}X{% endif %}{{ unk_token }}",
        "{{ messages | tojson }}{{ messages[0].content | tojson(ensure_ascii=true, indent=2) }}",
        "{{ strftime_now('%d %b %Y') }}{{ bos_token }}{{ eos_token }}",
        "  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n",
        "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}X{% endfor %}",
    ):
        text = theirs.apply_chat_template(asked, tokenize=False, chat_template=template)
        mine = Tokenizer(folder, chat_template=template)
        assert mine.decode(mine.apply_chat_template(asked)) == text, template
