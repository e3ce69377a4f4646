"""The messages of a chat: which fields they have, what those mean, and that none is lost in the text."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem.common.checks import show

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else a template reads

# Whether a turn of the assistant is trained: OpenAI and Mistral; axolotl; verl; LLaMA-Factory; ms-swift.
MASKS = ("weight", "train", "training", "trainable", "loss_mask", "loss")
# What no text says of a turn: which answer belongs to which call is told by their order.
_ELSEWHERE = ("role", "tool_call_id", "tool_calls")  # calls are looked at part by part
REASONING = ("reasoning_content", "thinking", "reasoning")  # as transformers: one thought under three names


def check_messages(messages: Any, special: Sequence[str]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages of one chat, as a template gets them, and which of them are trained.

    A string alone is one question of the user's. Fields that are None are left out, arguments of a tool's call that are
    a string of JSON, OpenAI's way, are read, as templates expect them.

    Raise ValueError for what is no list of `{"role": ..., "content": ...}`, for a mask that is not clear, and for a
    text, in whatever field, that holds one of the `special` tokens: it would end a turn, or begin one of another role.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={show(messages)}: expected a list of {{'role': ..., 'content': ...}}, or a string.")
    checked, trained = [], []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        calls = fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content", "" if calls else None), str):
            raise ValueError(
                f"{where}={show(message)}: expected {{'role': ..., 'content': ...}} with two strings, roles such "
                "as 'system', 'user' and 'assistant'."
            )
        if calls:
            fields["tool_calls"] = _read_calls(calls, where)
        check_texts(fields, where, special)
        trained.append(_is_trained(fields, where))
        checked.append({k: v for k, v in fields.items() if k not in MASKS})
    return checked, trained


def check_texts(value: Any, where: str, special: Sequence[str] = ()) -> None:
    """Raise ValueError for a string in `value`, however deep, with a special token or half a character."""
    for field, text in _strings(value):
        its = f" in its {field}" if field else ""
        if match := next((token for token in special if token in text), None):
            raise ValueError(
                f"{where} has the special token {match!r}{its}: the model would take it for an end "
                "of turn or a change of role. Write it otherwise, or leave the message out."
            )
        if half := next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None):
            raise ValueError(
                f"{where} has {half!r}{its}, half of a character (a lone surrogate), which no UTF-8 text can hold: a "
                "text was cut in the middle of one. Cut it elsewhere, or take the half out."
            )


def _strings(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Return each string in a value, keys too, and where it stands."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _strings(key, field or "fields")
            yield from _strings(part, f"{field}.{key}" if field else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for i, part in enumerate(value):
            yield from _strings(part, f"{field}[{i}]")


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools with their arguments as objects: OpenAI writes them as a string of JSON."""
    if (
        not isinstance(calls, Sequence)
        or isinstance(calls, str)
        or not all(isinstance(call, Mapping) for call in calls)
    ):
        raise ValueError(
            f"{where} has tool_calls={show(calls)}: expected a list of "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    read = []
    for call in calls:
        inner = call.get("function")
        function = dict(inner if isinstance(inner, Mapping) else call)
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(arguments or "{}")
            except ValueError:
                function["arguments"] = None
            if not isinstance(function["arguments"], dict):
                raise ValueError(
                    f"{where} calls {function.get('name')!r} with arguments={show(arguments)}: expected an object, or "
                    "a string that holds one in JSON."
                )
        read.append({**call, "function": function} if isinstance(inner, Mapping) else function)
    return read


def _is_trained(message: Message, where: str) -> bool:
    """Return whether a turn is trained, as far as its masks say. Raise ValueError where they do not say it clearly."""
    said = {name: message[name] for name in MASKS if name in message}
    for name, value in said.items():
        if value not in (0, 1):
            raise ValueError(
                f"{where} has {name}={show(value)}: expected 0 or 1 (false or true); a turn is trained or is not, and "
                "no turn counts for a part of another."
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise ValueError(f"{where} says two things of whether it is trained: {said}. Leave one of them.")
    if message["role"] != "assistant" and any(said.values()):
        raise ValueError(
            f"{where} is to be trained ({said}), and its role is {message['role']!r}: the assistant's turns alone are. "
            "Take the field out of the other turns."
        )
    return all(said.values())


def with_other_words(message: Message) -> dict[str, Any]:
    """Return a message of the same form whose words begin otherwise: what it calls, what it thinks and what it says."""
    other = dict(message)
    for field in ("content", *REASONING):
        if isinstance(words := message.get(field), str) and (words or not message.get("tool_calls")):
            other[field] = "y" if words.lstrip().startswith("x") else "x"

    def renamed(call: Message) -> dict[str, Any]:
        name = call.get("name")
        return {**call, "name": "y" if isinstance(name, str) and name.startswith("x") else "x"}

    if calls := message.get("tool_calls"):
        other["tool_calls"] = [
            {**call, "function": renamed(call["function"])} if "function" in call else renamed(call) for call in calls
        ]
    return other


def check_nothing_lost(
    messages: Sequence[Message],
    tools: Sequence[Any],
    render: Callable[[Sequence[Message], Sequence[Any]], str],
) -> None:
    """Raise ValueError, with its name, for what changes nothing in the text: a template has no place for it.

    That is a field of a message, or what a model has to know of calls and tools: see `_with_parts`.
    """
    text = render(messages, tools)

    def is_lost(messages: Sequence[Message], tools: Sequence[Any] = tools) -> bool:
        try:
            return render(messages, tools) == text
        except ValueError:  # the template asks for it
            return False

    def refuse(what: str, value: Any) -> None:
        raise ValueError(
            f"this chat template writes nothing of {what}, {show(value)}: the model would be trained without it. It "
            "has no place for it, or leaves out what was thought before an earlier answer. Take it out, or take a "
            "template that writes it: Tokenizer(..., chat_template=...)."
        )

    parts: list[tuple[str, Any]] = []

    def say(where: str, value: Any) -> str:
        parts.append((where, value))
        return f"p{len(parts)}z{len(text)}"

    def with_one_part(number: int, word: str) -> tuple[list[Message], list[Any]]:
        count = itertools.count(1)
        return _with_parts(messages, tools, lambda _, value: word if next(count) == number else value)

    # All that is said at once, in words that stand nowhere else: what comes out needs no text of its own.
    said = [f"q{i}z{len(text)}" for i in range(len(messages))]
    others, other_tools = _with_parts(messages, tools, say)
    try:
        others = [{**m, "content": s} if m.get("content") else m for m, s in zip(others, said, strict=True)]
        written = render(others, other_tools)
    except ValueError:
        written = ""
    for i, message in enumerate(messages):
        for field, value in message.items():
            if field in _ELSEWHERE or (field == "name" and message["role"] == "tool") or _is_empty(value):
                continue
            if field == "content" and said[i] in written:
                continue
            other = {k: v for k, v in message.items() if k != field}
            if field == "content":
                other = {**message, "content": "y" if value.lstrip().startswith("x") else "x"}
            if is_lost([*messages[:i], other, *messages[i + 1 :]]):
                refuse(f"the {field} of messages[{i}]", value)
    for n, (where, value) in enumerate(parts, start=1):
        word = f"p{n}z{len(text)}"
        if word not in written and is_lost(*with_one_part(n, word)):
            refuse(where, value)


def _with_parts(
    messages: Sequence[Message], tools: Sequence[Any], say: Callable[[str, Any], Any]
) -> tuple[list[Message], list[Any]]:
    """Return messages and tools with `say(where, value)` for each part of calls and tools that a model has to know.

    Those are names of functions, names and values of arguments, and descriptions; ids, types and what a function
    returns are left out by many good templates.
    """

    def of_arguments(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {say(f"{where}.{k}", k): of_arguments(v, f"{where}.{k}") for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [of_arguments(part, where) for part in value]
        return say(where, value)

    def of_call(call: Message, where: str) -> Message:
        if isinstance(inner := call.get("function"), Mapping):
            return {**call, "function": of_call(inner, f"{where}.function")}
        changed = {"name": say(f"{where}.name", call["name"])} if "name" in call else {}
        if "arguments" in call:
            changed["arguments"] = of_arguments(call["arguments"], f"{where}.arguments")
        return {**call, **changed}

    def of_tool(value: Any, where: str) -> Any:
        if isinstance(value, list | tuple):
            return [of_tool(part, where) for part in value]
        if not isinstance(value, Mapping):
            return value
        made = {}
        for key, part in value.items():
            at = f"{where}.{key}"
            if key == "properties" and isinstance(part, Mapping):
                made[key] = {say(f"{at}.{k}", k): of_tool(v, f"{at}.{k}") for k, v in part.items()}
            else:
                is_said = key in ("name", "description") and isinstance(part, str)
                made[key] = say(at, part) if is_said else part if key == "return" else of_tool(part, at)
        return made

    def of_message(i: int, message: Message) -> Message:
        calls = enumerate(message.get("tool_calls") or ())
        made = [of_call(call, f"messages[{i}].tool_calls[{n}]") for n, call in calls]
        return {**message, "tool_calls": made} if made else message

    return [of_message(*pair) for pair in enumerate(messages)], [of_tool(t, f"tools[{n}]") for n, t in enumerate(tools)]


def check_words(message: Message, text: str, where: str) -> None:
    """Raise ValueError where a turn's `text` leaves words out: some templates cut a thought out of what is said."""
    for field in ("content", *REASONING):
        words, at = message.get(field, ""), 0
        for word in words.split() if isinstance(words, str) else ():
            at = text.find(word, at)
            if at < 0:
                raise ValueError(
                    f"this chat template leaves {show(word)} out of the {field} of {where}: the model would be trained "
                    "without it. Take it out yourself, or end the chat after this turn where the template leaves out "
                    'the thoughts of earlier ones, or say that the turn is not trained, "weight": 0.'
                )
            at += len(word)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {}, ())
