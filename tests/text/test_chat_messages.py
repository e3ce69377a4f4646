"""Fields of messages: each is in the text, or refused by its name."""

import pytest
from templates import every

from llamem.text import Tokenizer

ASK = {"role": "user", "content": "Weather in Bonn?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bonn"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TOOLS = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOLS += [{"role": "tool", "content": "sunny", "tool_call_id": "c1"}, {"role": "assistant", "content": "It is sunny."}]
# As published for Llama 3.1, from transformers 5.24 with its template.
LLAMA31 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for a "
    "function call with its proper arguments that best answers the given prompt.\n\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
    '{\n    "type": "function",\n    "function": {\n        "name": "get_weather",\n        "parameters": {\n'
    '            "type": "object"\n        }\n    }\n}\n\nWeather in Bonn?<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "get_weather", "parameters": {"city": "Bonn"}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is sunny.<|eot_id|>"
)
# A template that writes tools, calls and thoughts, thoughts under gpt-oss's name and after the last question alone.
PROMPT = "{% if add_generation_prompt %}assistant: {% if think is false %}<think></think>{% endif %}{% endif %}"
TURN = (
    "{{ m.role + ': ' }}{% if m.thinking and loop.last %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
)
WHOLE = every(TURN, before="{% if tools %}{{ tools | tojson }}{{ eos_token }}{% endif %}") + PROMPT


@pytest.fixture(scope="module")
def llama3():
    return Tokenizer()


@pytest.fixture(scope="module")
def whole():
    return Tokenizer(chat_template=WHOLE)


def taught(tokenizer, messages, **given):
    ids, wrote = tokenizer.chat(messages, **given)
    return tokenizer.decode(ids), tokenizer.decode(ids[wrote])


@pytest.mark.quick
@pytest.mark.parametrize("arguments", [{"city": "Bonn"}, '{"city":"Bonn"}'])
def test_tools_and_their_calls_by_llama_3s_template(llama3, arguments):
    """OpenAI's arguments are a string of JSON; written as they are, they would be a string within the JSON."""
    call = {**CALL, "function": {**CALL["function"], "arguments": arguments}}
    system = {"role": "system", "content": " Be brief."}
    chat = [system, ASK, {**TOOLS[1], "tool_calls": [call]}, *TOOLS[2:]]
    text, learned = taught(llama3, chat, tools=[TOOL])
    assert text == LLAMA31
    assert learned == '{"name": "get_weather", "parameters": {"city": "Bonn"}}<|eot_id|>It is sunny.<|eot_id|>'
    asked = llama3.apply_chat_template(chat[:2], tools=[TOOL], add_generation_prompt=True)
    assert (
        LLAMA31.startswith(llama3.decode(asked)) and asked == llama3.chat(chat, tools=[TOOL])[0][: len(asked)].tolist()
    )


def test_a_thought_has_every_name_that_templates_know(whole):
    for name in ("reasoning_content", "thinking", "reasoning"):
        answer = {"role": "assistant", name: "Two and two.", "content": "Four."}
        assert taught(whole, [ASK, answer])[1] == "<think>Two and two.</think>Four.<|eot_id|>"


def test_what_a_template_reads_is_given_to_it(whole):
    answer = {"role": "assistant", "content": "Four."}
    text, learned = taught(whole, [ASK, answer], tools=[TOOL])
    assert '"get_weather"' in text and learned == "Four.<|eot_id|>"
    prompt = whole.decode(whole.apply_chat_template([ASK], add_generation_prompt=True, think=False))
    assert prompt.endswith("assistant: <think></think>")


@pytest.fixture(scope="module", params=[False, True], ids=["found", "marked"])
def either(llama3, request):
    turn = "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    marks = every("{{ m.role + ': ' }}{% if m.role == 'assistant' %}" + turn + "{% else %}{{ m.content }}{% endif %}")
    return Tokenizer(chat_template=marks) if request.param else llama3


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        *[("weight", 0, 0), ("weight", 0.0, 0), ("weight", 1, 1), ("train", False, 0), ("train", None, 1)],
        *[("training", False, 0), ("trainable", False, 0), ("loss_mask", 0, 0), ("loss", False, 0)],
    ],
)
def test_a_turn_that_is_not_to_be_trained_is_not(either, name, value, counts):
    tokenizer = either
    chat = [
        ASK,
        {"role": "assistant", "content": "WRONG", name: value},
        ASK,
        {"role": "assistant", "content": "Right."},
    ]
    plain = [{k: message[k] for k in ("role", "content")} for message in chat]
    assert taught(tokenizer, chat)[1] == "WRONG<|eot_id|>" * counts + "Right.<|eot_id|>"
    assert tokenizer.chat(chat)[0].tolist() == tokenizer.chat(plain)[0].tolist() == tokenizer.apply_chat_template(chat)


SAID = {"role": "assistant", "content": "Four."}
LOST = [
    ([ASK, {**SAID, "weight": 0.5}], {}, r"messages\[1\] has weight=0.5: expected 0 or 1"),
    ([ASK, {**SAID, "weight": 0, "train": True}], {}, "says two things of whether it is trained"),
    ([{**ASK, "weight": 1}, SAID], {}, "the assistant's turns alone are"),
    ([ASK, {**SAID, "reasoning_content": "Two and two."}], {}, "nothing of the reasoning_content of messages.1."),
    ([ASK, {**SAID, "tool_calls": [CALL]}], {}, r"writes nothing of the content of messages\[1\], 'Four.'"),
    ([{**ASK, "name": "Anna"}, SAID], {}, r"writes nothing of the name of messages\[0\], 'Anna'"),
    ([ASK, {"role": "assistant", "tool_calls": [CALL, CALL]}], {}, "Llama 3 calls one tool at a time"),
    ([ASK, {"role": "assistant", "tool_calls": ["f"]}], {}, "has tool_calls=.'f'.: expected a list"),
    ([ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1"}]}], {}, "calls 'f' with arguments"),
    ([ASK, SAID], {"enable_thinking": False}, "reads no enable_thinking"),
    ([ASK, SAID], {"documents": [ASK]}, "reads no documents"),
    ([SAID], {"tools": [TOOL]}, "tools are written into the first message of the user"),
    ([ASK, {**SAID, "content": "half \ud83d"}], {}, r"messages\[1\] has '\\ud83d' in its content, half of a character"),
    ([ASK, SAID], {"tools": [{"name": "f<|eot_id|>"}]}, "special token '<.eot_id.>' in its tools.0..name"),
    (
        [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<|eot_id|>"}}}]}],
        {},
        r"messages\[1\] has the special token '<.eot_id.>' in its tool_calls.0..function.arguments.x",
    ),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("messages", "given", "says"), LOST)
def test_what_would_be_lost_is_refused_by_name(llama3, messages, given, says):
    with pytest.raises(ValueError, match=says):
        llama3.chat(messages, **given)


def test_what_one_template_writes_in_part_is_refused_by_name(whole):
    thought = {**SAID, "reasoning_content": "Two and two."}
    with pytest.raises(ValueError, match=r"writes nothing of the reasoning_content of messages\[1\]"):
        whole.chat([ASK, thought, ASK, thought])
    first = Tokenizer(chat_template=WHOLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"))
    other = {"function": {"name": "g", "arguments": {}}}
    with pytest.raises(ValueError, match=r"writes nothing of messages\[1\].tool_calls\[1\].function.name, 'g'"):
        first.chat([ASK, {"role": "assistant", "tool_calls": [CALL, other]}])
    cuts = every("{{ m.role + ': ' + m.content.split('</think>')[-1] + eos_token }}", "assistant: ")
    with pytest.raises(ValueError, match=r"leaves '<think>two' out of the content of messages\[1\]"):
        Tokenizer(chat_template=cuts).chat([ASK, {**SAID, "content": "<think>two and two</think>Four."}])
    begins = every("{{ m.role + ': ' + m.content + eos_token }}", "assistant: <think>")
    text, learned = taught(Tokenizer(chat_template=begins), [ASK, {**SAID, "content": "<think>two</think>Four."}])
    assert learned == "two</think>Four.<|eot_id|>" and text.endswith("assistant: <think>two</think>Four.<|eot_id|>")
    deaf = every("{% if m.role != 'system' %}{{ m.role + ': ' + m.content + eos_token }}{% endif %}", "assistant: ")
    with pytest.raises(ValueError, match=r"writes nothing of the content of messages\[0\], 'Be kind.'"):
        Tokenizer(chat_template=deaf).chat([{"role": "system", "content": "Be kind."}, ASK, SAID])


CITY = {"type": "string", "description": "Bonn, or another one"}
GET = {"name": "get_weather", "description": "Weather", "parameters": {"properties": {"city": CITY}}}
RETURNS = {"return": {"type": "string", "description": "The sky"}}
IN_PART = [
    ("call.function", "call.function.name", r"messages\[1\].tool_calls\[0\].function.arguments.city, 'city'"),
    ("call.function", "call.function.arguments", r"messages\[1\].tool_calls\[0\].function.name, 'get_weather'"),
    ("call.function", "(call.function.arguments | list + [call.function.name])", r"function.arguments.city, 'Bonn'"),
    ("tools |", "tools | map(attribute='function.name') | list |", r"tools\[0\].function.description, 'Weather'"),
    ("tools |", "tools | map(attribute='function.parameters') | list |", r"tools\[0\].function.name, 'get_weather'"),
    ("tools |", "tools[0].function.description + tools[0].function.name |", r"parameters.properties.city, 'city'"),
    ("tools |", "tools[:1] |", r"tools\[1\].function.name, 'get_weather'"),
]


@pytest.mark.parametrize(("whole", "part", "says"), [pytest.param(*IN_PART[0], marks=pytest.mark.quick), *IN_PART[1:]])
def test_parts_of_calls_and_tools_that_a_template_drops_are_refused_by_name(whole, part, says):
    """Their words stand elsewhere in the text; an id and types stand nowhere, and may."""
    given = {"tools": [{"type": "function", "function": GET}] * 2}
    assert "Bonn" in taught(Tokenizer(chat_template=WHOLE), TOOLS, **given)[1]
    with pytest.raises(ValueError, match="writes nothing of .*" + says):
        Tokenizer(chat_template=WHOLE.replace(whole, part)).chat(TOOLS, **given)


def test_a_template_that_writes_signatures_in_its_own_way_loses_nothing():
    tool = (
        "{% for t in tools or [] %}{% set f = t.function %}def {{ f.name }}("
        "{% for k, v in f.parameters.properties.items() %}{{ k }}: {{ v.type[:3] }}, # {{ v.description | upper }}\n"
        "{% endfor %}): {{ f.description }}{% endfor %}"
    )
    call = "{% for k, v in call.function.arguments.items() %}{{ call.function.name }}.{{ k }} = {{ v + 1 }}{% endfor %}"
    template = tool + WHOLE.replace("{% if tools %}{{ tools | tojson }}{{ eos_token }}{% endif %}", "")
    tokenizer = Tokenizer(chat_template=template.replace("{{ call.function | tojson }}", call))
    calls = [{"function": {"name": "get_weather", "arguments": {"city": 1}}}]
    text, learned = taught(
        tokenizer, [ASK, {**TOOLS[1], "tool_calls": calls}], tools=[{"function": {**GET, **RETURNS}}]
    )
    assert "# BONN, OR ANOTHER ONE" in text and learned == "get_weather.city = 2<|eot_id|>"
