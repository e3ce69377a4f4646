"""Whose tokens they are, by templates of the forms that are published; right or refused."""

import copy
import datetime
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from templates import CHAT, PUBLISHED, every

from llamem.files import smollm2_file
from llamem.text import Tokenizer
from llamem.text.chat_template import make_render

ENDS = {"smollm2": "<|im_end|>", "llama3": "<|eot_id|>"}


@pytest.fixture(scope="module")
def with_template():
    """`with_template(name, template)`: each file is opened once."""
    opened = {"smollm2": Tokenizer(smollm2_file()), "llama3": Tokenizer()}

    def made(name, template):
        tokenizer = copy.copy(opened[name])
        tokenizer.chat_template, tokenizer._today = template, datetime.date(2026, 12, 24)
        return tokenizer

    return made


def check_answers(tokenizer, chat, taught):
    """The trained tokens are these texts, each after the prompt that a model is given, token by token."""
    ids, wrote = tokenizer.chat(chat)
    assert ids.tolist() == tokenizer.apply_chat_template(chat)
    runs = np.split(ids, np.flatnonzero(np.diff(wrote)) + 1)
    assert [tokenizer.decode(run) for run in runs[1::2]] == taught
    for i in [i for i, message in enumerate(chat) if message["role"] == "assistant"][-len(taught) :]:
        prompt = tokenizer.apply_chat_template(chat[:i], add_generation_prompt=True)
        assert ids[: len(prompt)].tolist() == prompt and wrote[len(prompt)] and not wrote[len(prompt) - 1]


@pytest.mark.quick
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("form", PUBLISHED)
def test_answers_are_told_from_questions_or_the_template_is_refused(with_template, name, form):
    template, taught = PUBLISHED[form]
    tokenizer = with_template(name, template)
    if isinstance(taught, list):
        check_answers(tokenizer, CHAT, [text.format(end=ENDS[name]) for text in taught])
    else:
        with pytest.raises(ValueError, match=taught):
            tokenizer.chat(CHAT)


PROMPTS = ["assistant: ", "assistant:", "assistant:\n", "### Response:\n\n", "A:  "]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_token_of_an_answer_is_lost_to_its_prompt(with_template, name, prompt):
    """Where the prompt ends in what BPE joins with a word, "Yes" trained its end alone."""
    turn = "{% if m.role == 'assistant' %}{{ " + repr(prompt) + " }}{% endif %}{{ m.content + eos_token }}"
    tokenizer = with_template(name, every(turn, prompt))
    for answer in ("Yes", "The capital is Paris.", "  indented", "\nYes", "2024", "🦙", " "):
        chat = [CHAT[0], {"role": "assistant", "content": answer}] * 2
        check_answers(tokenizer, chat, [answer + ENDS[name]] * 2)


def test_templates_see_what_transformers_gives_them(with_template, tmp_path):
    """The texts are those of transformers 5.23; test_parity asks it again."""
    asked = [{"role": "user", "content": "a<b & 'é'"}]
    for template, text in (
        ("{% if tools is not none %}X{% endif %}{% if documents is not none %}X{% endif %}-", "-"),
        ("{{ messages[0].content | tojson }}", "\"a<b & 'é'\""),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b & \'é\'"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "24 Dec 2026"),
        ("{% if pad_token is defined %}X{% endif %}{{ eos_token }}", "<|im_end|>"),
    ):
        tokenizer = with_template("smollm2", template)
        assert tokenizer.decode(tokenizer.apply_chat_template(asked)) == text, template
    folder = tokenizer.save(tmp_path)
    told = (folder / "tokenizer_config.json").read_text().replace("{", '{"pad_token": {"content": "<|im_start|>"},', 1)
    (folder / "tokenizer_config.json").write_text(told)
    again = Tokenizer(folder)
    assert again.decode(again.apply_chat_template(asked)) == "X<|im_end|>"
    dated = Tokenizer(folder, chat_template="{{ strftime_now('%Y') }}", today=datetime.date(1984, 4, 4))
    assert dated.decode(dated.apply_chat_template(asked)) == "1984"


def test_eight_threads_render_as_one():
    """Each with a chat of its own, by one template with the tag: no piece of a text is another's."""
    turn = "{% for word in m.content.split() %}{{ word + ' ' }}{% endfor %}"
    marked = every("{{ m.role + ': ' }}{% generation %}" + turn + "{{ eos_token }}{% endgeneration %}")
    render = make_render(marked, "here", {"eos_token": "</s>"}, datetime.date(2026, 12, 24))
    words = [f"{'abcdefgh'[i % 8]}{i} " * (20 + i % 8) for i in range(400)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            rendered = list(pool.map(lambda text: render([{"role": "x", "content": text}], False), words))
    finally:
        sys.setswitchinterval(interval)
    assert rendered == [(f"x: {text}</s>", [(3, f"{text}</s>")]) for text in words]


def a_space_before_a_text(how, folder):
    """A tokenizer as Llama 2's: letters, `▁` for a space, and one before a text by either of the two ways there are."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens = ["</s>", "▁", "\n", *"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz?!.,:'", "es", "Yes", "▁Yes"]
    merges = [("e", "s"), ("Y", "es"), ("▁", "Yes")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(content=" ", left=1)
    if how == "normalizer":
        parts = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        model.normalizer = tokenizers.normalizers.Sequence(parts)
    else:
        model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.Fuse(), strip])
    model.add_special_tokens(["</s>"])
    model.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("how", ["normalizer", "pre-tokenizer"])
def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_an_answer(how, tmp_path):
    turn = "{% if m.role == 'assistant' %}A: {% endif %}{{ m.content + eos_token }}"
    tokenizer = Tokenizer(a_space_before_a_text(how, tmp_path), chat_template=every(turn, "A: "))
    ids, wrote = tokenizer.chat([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Yes"}])
    assert [tokenizer.decode([i]) for i in ids[wrote].tolist()] == ["Yes", "</s>"]
    assert tokenizer.decode(ids) == ("Who?</s> A: Yes</s>" if how == "normalizer" else "Who?</s>A: Yes</s>")
