"""Chats as text: a model's own Jinja template, run in a sandbox, and where in the text the assistant speaks."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.common.checks import import_extra, show

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


class Rendered(NamedTuple):
    """A chat as a template writes it; `marked`: what stands in `{% generation %}` and where, None without that tag."""

    text: str
    marked: list[tuple[int, str]] | None


Render = Callable[[Sequence[Message], bool], Rendered]

# Of Llama 3 Instruct's models, for a tokenizer that comes without a template.
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def make_render(template: str, source: str, names: Mapping[str, str], today: datetime.date) -> Render:
    """Return `render(messages, add_generation_prompt)` of a Jinja template; `names` are its `bos_token` ...

    A template is somebody's program: it runs in Jinja's immutable sandbox and reaches nothing but its arguments, which
    are those of transformers: no tools, no documents, its `tojson`, `raise_exception`, and `strftime_now`, for which it
    is always `today`. Raise ValueError, with `source`, for a template that cannot be read, and from `render` for one
    that fails or tries to leave the sandbox.
    """
    jinja2 = import_extra("jinja2", "chat templates")
    sandbox, extensions = (import_extra(f"jinja2.{part}", "chat templates") for part in ("sandbox", "ext"))
    pieces: list[str] = []  # the text as far as it is written
    marked: list[tuple[int, str]] = []  # what stands in the tag, and where
    lines: list[int] = []  # on which the tag stands

    class Generation(extensions.Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

        def parse(self, parser: Any) -> Any:
            lines.append(next(parser.stream).lineno)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(lines[-1])

        def _mark(self, caller: Callable[[], str]) -> str:
            words = caller()
            marked.append((sum(map(len, pieces)), words))
            return words

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # As transformers sets it up: templates are written for these options.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": today.strftime}
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {source} is no Jinja template that can be run: {error}.") from None

    def render(messages: Sequence[Message], add_generation_prompt: bool) -> Rendered:
        pieces.clear()
        marked.clear()
        context = {"messages": list(messages), "tools": None, "documents": None, **names}
        try:
            for piece in compiled.generate(add_generation_prompt=add_generation_prompt, **context):
                pieces.append(piece)
        except Exception as error:  # whatever the template's own expressions raise
            raise ValueError(
                f"the chat template of {source} cannot write these {len(messages)} messages: {type(error).__name__}: "
                f"{error}. Roles so far: {[message.get('role') for message in messages][:8]}."
            ) from None
        return Rendered("".join(pieces), list(marked) if lines else None)

    return render


def check_messages(messages: Any, special: Sequence[str]) -> list[dict[str, str]]:
    """Return the messages of one chat; a string alone is one question of the user's.

    Raise ValueError for what is no list of `{"role": ..., "content": ...}`, and for a text that holds one of the
    `special` tokens: it would end a turn, or begin one of another role.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={show(messages)}: expected a list of {{'role': ..., 'content': ...}}, or a string.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(
                f"messages[{i}]={show(message)}: expected {{'role': ..., 'content': ...}} with two strings, roles such "
                "as 'system', 'user' and 'assistant'."
            )
        for field in ("role", "content"):
            if match := next((token for token in special if token in message[field]), None):
                raise ValueError(
                    f"messages[{i}] has the special token {match!r} in its {field}: the model would take it for an end "
                    "of turn or a change of role. Write it otherwise, or leave the message out."
                )
    return [dict(message) for message in messages]


def assistant_spans(
    messages: Sequence[Message], render: Render, stops: Sequence[str], add_generation_prompt: bool = False
) -> tuple[str, list[slice]]:
    """Return the text of a chat, and where in it the assistant speaks: each turn up to the token that ends it.

    Where the template marks `{% generation %}`, that is what it wrote, to the letter. Elsewhere a turn begins where the
    prompt of the messages before it ends, and is ended by one of the tokens `stops`, before the words of the message
    after it. Raise ValueError where the template does not tell that, or would have a model never stop.
    """
    text, marked = render(messages, add_generation_prompt)
    if marked is not None:
        if any(not text.startswith(words, at) for at, words in marked):
            raise ValueError(
                "this chat template has {% generation %} inside a macro or a block that it writes later, so that its "
                "place in the text is not known. Write the tag where the answer is written."
            )
        if marked and not any(stop in words for _, words in marked for stop in stops):
            raise ValueError(
                f"this chat template marks none of the tokens {_named(stops)} as generated: a model trained on it "
                "would never stop. Write the token that ends a turn inside {% generation %}."
            )
        return text, [slice(at, at + len(words)) for at, words in marked]
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], True).text
        if not text.startswith(prompt):
            raise ValueError(
                f"this chat template writes messages[:{i}] otherwise as a prompt than within the whole chat, so that "
                "the assistant's tokens cannot be told from the others. Train on chats of one turn, or with a simpler "
                "template: Tokenizer(..., chat_template=...)."
            )
        head = text[len(prompt) : _words_begin(text, messages, i, render, add_generation_prompt)]
        if head.strip() and prompt == render(messages[:i], False).text:
            raise ValueError(
                f"this chat template leaves the generation prompt out, so that a model would have to write {head!r} "
                "before each answer itself. Write that where the template is asked for it: {% if add_generation_prompt "
                "%}...{% endif %} at its end."
            )
        until = _words_begin(text, messages, i + 1, render, add_generation_prompt)
        places = [(text.find(stop, len(prompt), until), stop) for stop in stops]
        ends = [at + len(stop) for at, stop in places if at >= 0]
        if not ends:
            raise ValueError(
                f"this chat template ends messages[{i}] by none of the tokens {_named(stops)} before another message "
                "begins: a model trained on it would never stop, and would learn to write the user's words. Pass the "
                "model's own template, Tokenizer(..., chat_template=...), or end every turn by eos_token."
            )
        spans.append(slice(len(prompt), min(ends)))
    return text, spans


def _words_begin(text: str, messages: Sequence[Message], i: int, render: Render, add_generation_prompt: bool) -> int:
    """Return where in the text the words of `messages[i:]` begin: up to there it is the same with other words."""
    if i == len(messages):
        return len(text)
    others = [{**m, "content": "y" if m["content"].lstrip().startswith("x") else "x"} for m in messages[i:]]
    with_others = render([*messages[:i], *others], add_generation_prompt).text
    differ = (at for at, (a, b) in enumerate(zip(text, with_others, strict=False)) if a != b)
    return next(differ, min(len(text), len(with_others)))


def _named(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens))
