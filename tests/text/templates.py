"""Chat templates of the forms that published models have, in our own words, and what of CHAT they let a model learn."""

CHAT = [
    {"role": "user", "content": "Who wrote 1984?"},
    {"role": "assistant", "content": "George Orwell."},
    {"role": "user", "content": "Born when, & where?"},
    {"role": "assistant", "content": "Yes: 1903"},
]
PLAIN = ["George Orwell.{end}", "Yes: 1903{end}"]
THINKING = "{% if '</think>' in m.content or not loop.last %}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"


def every(turn, prompt="", before=""):
    """A template that writes each message as `turn`."""
    asked = "{% if add_generation_prompt %}{{ " + repr(prompt) + " }}{% endif %}" if prompt else ""
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + asked


def two(user, assistant, prompt="", before=""):
    """One that writes the assistant's messages otherwise than those of others."""
    turn = "{% if m.role == 'assistant' %}" + assistant + "{% else %}" + user + "{% endif %}"
    return every(turn, prompt, before)


HEADERS = "{{ '<|im_start|>' + m.role + '\n' }}"
DATED = (
    "{{ bos_token }}{% if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}Today: {{ day }}\n"
)

# The template and the texts that it teaches, or the words in which it is refused.
PUBLISHED = {
    "Llama 3, a date and tools": (
        every(
            "{{ '<|' + m.role + '|>\n\n' + m.content | trim + eos_token }}",
            "<|assistant|>\n\n",
            DATED + "{% if tools is not none %}Tools: {{ tools | tojson }}{% endif %}",
        ),
        PLAIN,
    ),
    "ChatML": (every(HEADERS + "{{ m.content + eos_token + '\n' }}", "<|im_start|>assistant\n"), PLAIN),
    "SmolLM, its own system": (
        every(
            "{% if loop.first and m.role != 'system' %}"
            "{{ '<|im_start|>system\nBe kind.' + eos_token + '\n' }}{% endif %}"
            + HEADERS
            + "{{ m.content + eos_token + '\n' }}",
            "<|im_start|>assistant\n",
        ),
        PLAIN,
    ),
    "Qwen3, a thought in the last answer": (
        two(
            HEADERS + "{{ m.content + eos_token + '\n' }}",
            HEADERS + THINKING + "{{ m.content + eos_token + '\n' }}",
            "<|im_start|>assistant\n",
        ),
        ["George Orwell.{end}", "<think>\n\n</think>\n\nYes: 1903{end}"],
    ),
    "Zephyr": (every("{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}", "<|assistant|>\n"), PLAIN),
    "Vicuna": (
        two(
            "{{ 'USER: ' + m.content + ' ' }}", "{{ 'ASSISTANT: ' + m.content + eos_token }}", "ASSISTANT: ", "A chat. "
        ),
        PLAIN,
    ),
    "BitNet": (every("{{ m.role | capitalize + ': ' + m.content | trim + eos_token }}", "Assistant: "), PLAIN),
    "calm2": (
        two("{{ 'USER: ' + m.content + '\n' }}", "{{ 'ASSISTANT: ' + m.content + eos_token }}", "ASSISTANT: "),
        PLAIN,
    ),
    "Llama 2": (
        two("{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}", "{{ ' ' + m.content + ' ' + eos_token }}"),
        [" George Orwell. {end}", " Yes: 1903 {end}"],
    ),
    "Alpaca": (
        two(
            "{{ '### Instruction:\n' + m.content + '\n\n' }}",
            "{{ '### Response:\n' + m.content + eos_token + '\n\n' }}",
            "### Response:\n",
        ),
        PLAIN,
    ),
    "Marin, marked": (
        two(
            "{{ '<|' + m.role + '|>\n' + m.content + eos_token }}",
            "{{ '<|' + m.role + '|>\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}\n",
            "<|assistant|>\n",
        ),
        PLAIN,
    ),
    "only the last answer marked": (
        two(
            "{{ 'U: ' + m.content + eos_token }}",
            "A:\n{% if loop.last %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
            "{% else %}{{ m.content + eos_token }}{% endif %}",
            "A:\n",
        ),
        PLAIN[1:],
    ),
    "DeepSeek's distilled, a thought begun by the prompt": (
        every("{{ m.role + ':' + m.content + eos_token }}", "assistant:<think>\n"),
        r"messages\[:1\] otherwise as a prompt",
    ),
    "Guanaco, an end for the whole chat": (
        every("{{ m.role + ':\n' + m.content + '\n' }}", "assistant:\n")
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        r"ends messages\[1\] by none of the tokens .* before another message begins",
    ),
    "an end for the last message": (
        every("{{ m.role + ':\n' + m.content + '\n' }}{% if loop.last and not add_generation_prompt %}")[
            : -len("{% endfor %}")
        ]
        + "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}",
        r"ends messages\[1\] by none of the tokens .* before another message begins",
    ),
    "ends for the user alone": (
        two("{{ 'U: ' + m.content + eos_token }}", "{{ 'A:\n' + m.content + '\n' }}", "A:\n"),
        r"ends messages\[1\] by none of the tokens .* before another message begins",
    ),
    "no generation prompt": (
        every("{{ m.role + ': ' + m.content + eos_token }}"),
        "would have to write 'assistant: ' before each answer",
    ),
    "an end before each message": (
        every("{% if not loop.first %}{{ eos_token }}{% endif %}{{ m.role + ': ' + m.content }}"),
        r"would have to write '<\|.*\|>assistant: '",
    ),
    "marked without an end": (
        two("{{ m.content + '\n' }}", "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"),
        "marks none of the tokens .* as generated",
    ),
    "marked in a macro": (
        "{% macro answer(m) %}A: {% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ answer(m) }}{% endfor %}",
        r"this chat template has {% generation %} inside a macro",
    ),
}
