"""Chats as text: a model's own Jinja template, run in a sandbox, and where in the text the assistant speaks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamem._checks import show
from llamem._extras import import_extra

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
Render = Callable[[Sequence[Message], bool], str]

# Of Llama 3 Instruct's models, for a tokenizer that comes without a template.
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def make_render(template: str, source: str, **names: str | None) -> Render:
    """Return `render(messages, add_generation_prompt) -> text` of a Jinja template; `names` are its `bos_token` ...

    A template is somebody's program: it runs in Jinja's immutable sandbox and reaches nothing but its arguments.
    `strftime_now` is not among them, so that the same chat has the same tokens tomorrow. Raise ValueError, with
    `source`, for a template that cannot be read, and from `render` for one that fails or tries to leave the sandbox.
    """
    jinja2 = import_extra("jinja2", "chat templates")
    sandbox = import_extra("jinja2.sandbox", "chat templates")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # As transformers sets it up: templates are written for these options.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {source} is no Jinja template that can be run: {error}.") from None

    def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        given = {name: value or "" for name, value in names.items()}
        try:
            return compiled.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # whatever the template's own expressions raise
            raise ValueError(
                f"the chat template of {source} cannot write these {len(messages)} messages: {type(error).__name__}: "
                f"{error}. Roles so far: {[message.get('role') for message in messages][:8]}."
            ) from None

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
            if found := next((token for token in special if token in message[field]), None):
                raise ValueError(
                    f"messages[{i}] has the special token {found!r} in its {field}: the model would take it for an end "
                    "of turn or a change of role. Write it otherwise, or leave the message out."
                )
    return [dict(message) for message in messages]


def assistant_spans(messages: Sequence[Message], render: Render, stops: Sequence[str]) -> tuple[str, list[slice]]:
    """Return the text of a chat, and where in it the assistant speaks: each turn up to the token that ends it.

    A turn begins where the prompt of the messages before it ends. Raise ValueError where the template does not write
    the chat as that prompt and what follows, or ends a turn by none of the tokens `stops`.
    """
    text = render(messages, False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], True)
        if not text.startswith(prompt):
            raise ValueError(
                f"this chat template writes messages[:{i}] otherwise as a prompt than within the whole chat, so that "
                "the assistant's tokens cannot be told from the others. Train on chats of one turn, or with a simpler "
                "template: Tokenizer(..., chat_template=...)."
            )
        ends = [at + len(stop) for stop in stops if (at := text.find(stop, len(prompt))) >= 0]
        if not ends:
            raise ValueError(
                f"this chat template ends messages[{i}] by none of the tokens {', '.join(map(repr, stops))}: a model "
                "trained on it would never stop. Pass the model's own template: Tokenizer(..., chat_template=...)."
            )
        spans.append(slice(len(prompt), min(ends)))
    return text, spans
