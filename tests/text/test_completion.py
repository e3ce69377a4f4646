"""Texts out of a model: what no tokenizer can read is refused."""

import pytest
from models import SMALL, model_of

from llamem import generate_text
from llamem.text import Tokenizer


def test_half_a_character_in_a_prompt_is_refused():
    tokenizer, model = Tokenizer(), model_of(SMALL.replace(n_layers=1))
    with pytest.raises(ValueError, match=r"prompts\[1\] has '\\ud83d', half of a character"):
        generate_text(model, tokenizer, ["whole", "half \ud83d"], 1)
    with pytest.raises(ValueError, match=r"messages\[0\] has '\\ud83d' in its content, half of a character"):
        generate_text(model, tokenizer, [[{"role": "user", "content": "half \ud83d"}]], 1)
