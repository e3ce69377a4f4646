"""Records as other people's files have them: read whole, or refused by the field's name, with file and line."""

import json
import warnings

import pytest

from llamem.text import Tokenizer
from llamem.train import load_chats

ASK, SAID = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture(scope="module")
def llama3():
    return Tokenizer()


def learned(record, tokenizer):
    chat = load_chats([record], tokenizer, heldout=0).train[0]
    return tokenizer.decode(chat.ids), tokenizer.decode(chat.ids[chat.wrote])


@pytest.mark.quick
def test_tools_and_system_reach_the_template(llama3):
    calls = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for tools in ([TOOL], json.dumps([TOOL])):
        text, taught = learned({"messages": calls, "tools": tools, "system": "Be kind."}, llama3)
        assert '"name": "add",\n' in text and "Be kind.<|eot_id|>" in text
        assert taught == '{"name": "add", "parameters": {}}<|eot_id|>'
    text, taught = learned({"prompt": "Two and two?", "completion": "Four.", "system": "Be kind."}, llama3)
    assert "system<|end_header_id|>\n\nBe kind.<|eot_id|>" in text and taught == "Four.<|eot_id|>"


def test_chat_template_kwargs_reach_the_template():
    prompt = "{% if add_generation_prompt %}A: {% if think is false %}<no>{% endif %}{% endif %}"
    turn = "{{ m.content + eos_token }}"
    answer = "A: {% if think is false %}<no>{% endif %}" + turn
    template = "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + turn + "{% endif %}"
    tokenizer = Tokenizer(chat_template=template + "{% endfor %}" + prompt)
    text, taught = learned({"messages": [ASK, SAID], "chat_template_kwargs": {"think": False}}, tokenizer)
    assert "A: <no>Four." in text and taught == "Four.<|eot_id|>"
    assert "<no>" not in learned({"messages": [ASK, SAID]}, tokenizer)[0]


def test_masks_in_messages_and_beside_them(llama3):
    wrong = {"role": "assistant", "content": "Five."}
    for record in (
        {"messages": [ASK, {**wrong, "weight": 0}, ASK, SAID]},
        {"messages": [ASK, wrong, ASK, SAID], "loss_mask": [0, 0, 0, 1]},
        {"messages": [ASK, wrong, ASK, SAID], "trainable": [False, False, False, True]},
    ):
        assert learned(record, llama3)[1] == "Four.<|eot_id|>"
    assert learned({"messages": [ASK, SAID], "weight": 1}, llama3)[1] == "Four.<|eot_id|>"
    empty = {"messages": [ASK, {**SAID, "content": "", "weight": 0}, ASK, SAID]}
    assert learned(empty, llama3)[1] == "Four.<|eot_id|>"


def test_what_only_tells_about_a_chat_is_named_once(llama3):
    record = {"messages": [{**ASK, "id": "m1"}, SAID], "source": "a book", "uuid": "1", "tools": [], "images": None}
    with pytest.warns(UserWarning, match="the fields id, source, uuid of the chats are not read") as said:
        load_chats([record] * 3, llama3, heldout=0)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_chats([{"messages": [ASK, SAID], "tools": [], "images": None}] * 2, llama3, heldout=0)


BAD = [
    ({"messages": [ASK, SAID], "chosen": "Five."}, "the field chosen beside messages, which would be lost, as 'Five.'"),
    ({"messages": [ASK, SAID], "images": [1], "x": 2}, "it has the fields images, x beside messages"),
    ({"messages": [ASK, SAID], "prompt": "Two?"}, "the field prompt beside messages"),
    ({"messages": [ASK, SAID], "loss_mask": [1]}, "has loss_mask=.1. beside its 2 messages: expected a list"),
    ({"messages": [ASK, SAID], "weight": 0.5}, "has weight=0.5 beside its 2 messages"),
    ({"messages": [ASK, {**SAID, "weight": 1}], "weight": [0, 0]}, "its weight says 0 of messages.1., and that says 1"),
    ({"messages": [{**ASK, "role": "system"}, ASK, SAID], "system": "B"}, "no message of the system beside it"),
    ({"messages": [ASK, SAID], "tools": "[1]"}, "has tools='.1.': expected a list of objects"),
    ({"messages": [ASK, SAID], "chat_template_kwargs": {"think": 1}}, "reads no think"),
    ({"messages": [ASK, SAID], "chat_template_kwargs": {"tools": [1]}}, "and none of messages, tools"),
    ({"messages": [ASK, {**SAID, "role": "model"}, ASK, SAID]}, "messages.1. has the role 'model'.* as 'assistant'"),
    ({"messages": [ASK, {**SAID, "role": "Assistant"}, ASK, SAID]}, "messages.1. has the role 'Assistant'"),
    ({"messages": [{**ASK, "role": "human"}, SAID]}, "messages.0. has the role 'human'.*know as 'user'"),
    ({"messages": [ASK, {**SAID, "content": " "}, ASK, SAID]}, "messages.1. is an empty answer"),
    ({"messages": [ASK, {**SAID, "weight": 0}]}, "no turn of the assistant that is trained"),
    ({"messages": [ASK, {**SAID, "rating": 5}]}, "writes nothing of the rating of messages.1., 5"),
    ({"messages": [ASK, {**SAID, "content": "\ud83d"}]}, "half of a character"),
    ({"prompt": "Two?", "completion": ""}, "messages.1. is an empty answer"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("record", "says"), BAD)
def test_what_is_not_read_is_refused_with_file_and_line(llama3, tmp_path, record, says):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [ASK, SAID]}) + "\n" + json.dumps(record))
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 2: .*" + says):
        load_chats(file, llama3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PAR1" + bytes(range(256)), 'a Parquet file; its rows are datasets.load_dataset."parquet"'),
        ('{"messages": []}'.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ('{"messages": []}'.encode("utf-16-le"), "iconv -f utf-16le -t utf-8"),
        (b"\x1f\x8b\x08\x00", "compressed by gzip"),
        ("ü".encode("latin1"), "iconv -f latin1"),
        (b"\n" + b"[" * 200_000, r"chats\.jsonl, line 2: no JSON .nested too deeply."),
    ],
    ids=["parquet", "utf-16", "utf-16 without a mark", "gzip", "latin1", "200,000 brackets"],
)
def test_a_file_of_another_kind_is_named_with_its_remedy(llama3, tmp_path, content, says):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_chats(file, llama3)


def test_a_folder_is_refused(llama3, tmp_path):
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        load_chats(tmp_path, llama3)
