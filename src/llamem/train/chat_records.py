"""Records of chats, as other people's files have them: every field is read, or refused by its name."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.common.checks import few, show
from llamem.text.chat_messages import MASKS, REASONING
from llamem.train.data import read_utf8

_EXPECTED = (
    'expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or '
    '{"prompt": "...", "completion": "..."}'
)
_READ = ("tools", "system", "chat_template_kwargs", *MASKS)
# What tells something about a turn or a chat and stands in none: named once, and left.
_ABOUT_A_TURN = frozenset({"_id", "created_at", "id", "timestamp", "uuid"})
ABOUT = (
    _ABOUT_A_TURN
    | {"category", "dataset", "dataset_name", "dataset_source", "date", "domain", "generator", "hash", "idx", "index"}
    | {"lang", "language", "license", "meta", "metadata", "name", "num_tokens", "num_turns", "prompt_id", "source"}
    | {"split", "subset", "tags", "task", "topic", "url", "version"}
)
# Roles under another framework's name: a template would write them as they are, and nothing of them be trained.
_OTHER_ROLES = {"gpt": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant", "human": "user"}
_ROLES = ("assistant", "user", "system", "tool", "developer")


class Record(NamedTuple):
    """One chat, and what its template is given: descriptions of `tools`, and other names that it reads."""

    messages: list[Any]
    tools: list[Any]
    names: dict[str, Any]
    about: list[str]  # fields that say something about the chat, and are not read


def records_of(source: Any) -> Iterator[tuple[str, Any]]:
    """Return each record of a JSONL file or a sequence, and where it stands. Raise ValueError as `load_chats`."""
    if not isinstance(source, str | os.PathLike):
        yield from ((f"chat {i}", record) for i, record in enumerate(source))
        return
    file = Path(source).expanduser()
    if file.is_dir():
        raise ValueError(f"{str(source)!r} is a folder: name a file in it, with a chat in each line.")
    for number, line in enumerate(read_utf8(file).split("\n"), start=1):
        where = f"{source}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            what = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{where}: no JSON ({what}): {show(line)}; {_EXPECTED}. Nothing was loaded.") from None


def read_record(record: Any) -> Record:
    """Return what a record holds: its fields are OpenAI's, those of the frameworks that train on them, or refused."""
    if isinstance(record, Mapping) and isinstance(record.get("messages"), list):
        form, messages = ("messages",), list(record["messages"])
    elif isinstance(record, Mapping) and all(isinstance(record.get(side), str) for side in ("prompt", "completion")):
        form = ("prompt", "completion")
        messages = [
            {"role": role, "content": record[side]} for role, side in zip(("user", "assistant"), form, strict=True)
        ]
    else:
        raise ValueError(f"{show(record)} is no chat; {_EXPECTED}.")
    fields = {k: v for k, v in record.items() if k not in form and not (v is None or (v in ("", [], {}, ())))}
    about = [name for name in fields if name in ABOUT]
    if unknown := [name for name in fields if name not in ABOUT and name not in _READ]:
        raise ValueError(
            f"it has the field{'s' * (len(unknown) > 1)} {few(unknown)} beside {form[0]}, which would be lost, as "
            f"{show(fields[unknown[0]])}. Read are {', '.join(_READ)}; take out what is to have no part in training "
            f'(of a data set, dataset.select_columns(["{form[0]}"])).'
        )
    messages = _with_masks(messages, {name: fields[name] for name in MASKS if name in fields})
    if (system := fields.get("system")) is not None:
        if not isinstance(system, str) or any(_role(message) == "system" for message in messages):
            raise ValueError(f"it has system={show(system)}: expected a text, and no message of the system beside it.")
        messages = [{"role": "system", "content": system}, *messages]
    messages, more = _without_about(messages)
    _check_turns(messages)
    names = fields.get("chat_template_kwargs", {})
    ours = ("messages", "tools", "documents", "add_generation_prompt")
    if not isinstance(names, Mapping) or any(name in ours for name in names):
        raise ValueError(
            f"it has chat_template_kwargs={show(names)}: expected an object of names and values, and none of "
            f"{', '.join(ours)} in it."
        )
    return Record(messages, _tools(fields.get("tools", [])), dict(names), [*about, *more])


def _tools(tools: Any) -> list[Any]:
    """Return descriptions of tools; data sets keep them as a string of JSON, since each has other fields."""
    try:
        read = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        read = None
    if not isinstance(read, list) or not all(isinstance(tool, Mapping) for tool in read):
        raise ValueError(f"it has tools={show(tools)}: expected a list of objects, or a string that holds one in JSON.")
    return read


def _with_masks(messages: list[Any], masks: Mapping[str, Any]) -> list[Any]:
    """Return the messages with what stands beside them of whether each is trained, a list as long as they are."""
    for name, values in masks.items():
        if isinstance(values, int | float) and values == 1:
            continue  # the whole chat is trained, as it is without
        if not isinstance(values, list) or len(values) != len(messages):
            raise ValueError(
                f"it has {name}={show(values)} beside its {len(messages)} messages: expected a list with 0 or 1 for "
                "each of them. A chat that counts for more than another, or single tokens, are not read here."
            )
        for i, (message, value) in enumerate(zip(messages, values, strict=True)):
            if isinstance(message, Mapping) and name in message and message[name] != value:
                raise ValueError(f"its {name} says {show(value)} of messages[{i}], and that says {message[name]!r}.")
        messages = [
            {**message, name: value} if isinstance(message, Mapping) else message
            for message, value in zip(messages, values, strict=True)
        ]
    return messages


def _without_about(messages: list[Any]) -> tuple[list[Any], list[str]]:
    """Return the messages without what only tells something about them, and the names of that."""
    told = [[k for k in m if k in _ABOUT_A_TURN] if isinstance(m, Mapping) else [] for m in messages]
    kept = [
        {k: v for k, v in m.items() if k not in names} if names else m for m, names in zip(messages, told, strict=True)
    ]
    return kept, [name for names in told for name in names]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _check_turns(messages: Sequence[Any]) -> None:
    """Raise ValueError for a role under another name, and for an answer that is empty and trained."""
    for i, message in enumerate(messages):
        role = _role(message)
        if not isinstance(role, str):
            continue
        known = role.strip().lower()
        if (meant := _OTHER_ROLES.get(known, known)) in _ROLES and role != meant:
            raise ValueError(
                f"messages[{i}] has the role {role!r}, which templates know as {meant!r}: it would be written and "
                "trained as somebody else's. Rename it."
            )
        says = [message.get(field) for field in ("content", "tool_calls", *REASONING)]
        trained = all(message.get(name) in (None, 1) for name in MASKS)
        if role == "assistant" and trained and not any(s.strip() if isinstance(s, str) else s for s in says):
            raise ValueError(
                f"messages[{i}] is an empty answer: a model would learn to end its turn without a word. Leave the chat "
                'out, end it before, or say that the turn is not trained, "weight": 0.'
            )
