"""Chats as text: a model's own Jinja template, run in a sandbox, and where in the text the assistant speaks."""

import bisect
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.common.checks import few, import_extra
from llamem.text.chat_messages import REASONING, Message, check_nothing_lost, check_words, with_other_words


class Rendered(NamedTuple):
    """A chat as a template writes it; `marked`: what stands in `{% generation %}` and where, None without that tag."""

    text: str
    marked: list[tuple[int, str]] | None


Render = Callable[[Sequence[Message], bool], Rendered]
_CALL = "this call"  # no name that a template can write: the text of one call as far as it is written, and its marks
_OURS = ("messages", "add_generation_prompt", "documents")

# Of Llama 3 Instruct's models, for a tokenizer that comes without a template. With tools it is Llama 3.1's, whose calls
# and answers are written so without them as well.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {%- set system = '' %}
    {%- if messages[0].role == 'system' %}
        {%- set system = messages[0].content | trim %}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {%- set dates = 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' + dates + system + '<|eot_id|>' }}
    {%- if not messages or messages[0].role != 'user' %}
        {{- raise_exception('tools are written into the first message of the user, which has to come first') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Given the following functions, please respond with a JSON for a function call ' }}
    {{- 'with its proper arguments that best answers the given prompt.\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- 'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('Llama 3 calls one tool at a time: one call in tool_calls') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def make_render(template: str, source: str, names: Mapping[str, str], today: datetime.date) -> Callable[..., Rendered]:
    """Return `render(messages, add_generation_prompt, **given)` of a Jinja template; `names` are its `bos_token` ...

    A template is somebody's program: it runs in Jinja's immutable sandbox and reaches nothing but its arguments, which
    are those of transformers: `given`, such as `tools`, no documents, its `tojson`, `raise_exception`, and
    `strftime_now`, for which it is always `today`. Threads may call one `render`. Raise ValueError, with `source`, for
    a template that cannot be read, and from `render` for one that fails or tries to leave the sandbox, or that does
    not read what is given.
    """
    jinja2 = import_extra("jinja2", "chat templates")
    sandbox, extensions = (import_extra(f"jinja2.{part}", "chat templates") for part in ("sandbox", "ext"))
    lines: list[int] = []  # on which the tag stands

    class Generation(extensions.Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

        def parse(self, parser: Any) -> Any:
            lines.append(next(parser.stream).lineno)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lines[-1])

        def _mark(self, context: Any, caller: Callable[[], str]) -> str:
            words = caller()
            pieces, marked = context[_CALL]
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
        reads = import_extra("jinja2.meta", "chat templates").find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {source} is no Jinja template that can be run: {error}.") from None

    def render(messages: Sequence[Message], add_generation_prompt: bool, **given: Any) -> Rendered:
        if unread := sorted(
            name for name, value in given.items() if value is not None and (name in _OURS or name not in reads)
        ):
            raise ValueError(
                f"the chat template of {source} reads no {few(unread)}: what it is given would be lost. Leave it out, "
                "or take a template that reads it, Tokenizer(..., chat_template=...)."
            )
        pieces: list[str] = []  # the text as far as it is written
        marked: list[tuple[int, str]] = []  # what stands in the tag, and where
        context = {**names, "tools": None, **given, "documents": None, _CALL: (pieces, marked)}
        context |= {"messages": [_with_thought(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        try:
            for piece in compiled.generate(context):
                pieces.append(piece)
        except Exception as error:  # whatever the template's own expressions raise
            raise ValueError(
                f"the chat template of {source} cannot write these {len(messages)} messages: {type(error).__name__}: "
                f"{error}. Roles so far: {[message.get('role') for message in messages][:8]}."
            ) from None
        return Rendered("".join(pieces), marked if lines else None)

    return render


def _with_thought(message: Message) -> dict[str, Any]:
    """Return a message whose thought has the names that templates know, as transformers gives it to them."""
    thought = next((message[name] for name in REASONING if name in message), None)
    return dict(message) if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def assistant_spans(
    messages: Sequence[Message], render: Render, stops: Sequence[str], add_generation_prompt: bool = False
) -> tuple[str, list[tuple[slice, int | None]]]:
    """Return the text of a chat, and where in it the assistant speaks: each turn up to the token that ends it.

    With each turn comes the number of its message, None where a template marks more or fewer parts than there are.

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
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        owners = answers if len(answers) == len(marked) else [None] * len(marked)
        return text, [(slice(at, at + len(words)), i) for (at, words), i in zip(marked, owners, strict=True)]
    spans: list[tuple[slice, int | None]] = []
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
        if head.strip() and not message.get("tool_calls") and prompt == render(messages[:i], False).text:
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
        spans.append((slice(len(prompt), min(ends)), i))
    return text, spans


def trained_spans(
    messages: Sequence[Message],
    trained: Sequence[bool],
    tools: Sequence[Any],
    render: Callable[..., Rendered],
    stops: Sequence[str],
) -> tuple[str, list[tuple[slice, bool]]]:
    """Return the text of a chat, where in it the assistant speaks, and whether that is trained, by message.

    Raise ValueError as `assistant_spans`, and where a field, or words of a turn that is trained, are not in the text.
    """
    text, answers = assistant_spans(messages, render, stops)
    check_nothing_lost(messages, tools, lambda messages, tools: render(messages, False, tools=tools or None).text)
    is_marked = render(messages, False).marked is not None  # to the letter: a thought may stand before the tag
    before = 0  # where the last answer ended: a prompt may begin the thought that the answer goes on with
    for span, i in answers:
        if i is not None and trained[i]:
            check_words(messages[i], text if is_marked else text[before : span.stop], f"messages[{i}]")
        before = span.stop
        if i is None and not all(trained):
            raise ValueError(
                f"messages[{trained.index(False)}] is not to be trained, and this chat template marks {len(answers)} "
                "parts by {% generation %}, another number than there are answers, so that it is not known which is "
                "its. Mark each answer once, or leave the turn out."
            )
    return text, [(span, i is None or trained[i]) for span, i in answers]


def _words_begin(text: str, messages: Sequence[Message], i: int, render: Render, add_generation_prompt: bool) -> int:
    """Return where in the text the words of `messages[i:]` begin: up to there it is the same with other words."""
    if i == len(messages):
        return len(text)
    others = [with_other_words(message) for message in messages[i:]]
    with_others = render([*messages[:i], *others], add_generation_prompt).text
    shortest = min(len(text), len(with_others))
    return bisect.bisect_left(range(1, shortest + 1), True, key=lambda n: text[:n] != with_others[:n])


def _named(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens))
