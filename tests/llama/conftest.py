import pytest

import llamem
from llamem.files import smollm2_file
from llamem.text import Tokenizer


@pytest.fixture(scope="session")
def smollm2():
    """The real model, dequantised to f32."""
    return llamem.load_pretrained(smollm2_file(), dtype="float32")


@pytest.fixture(scope="session")
def smollm2_blocks():
    """The real model in its own four bits, computed in f32."""
    return llamem.load_pretrained(smollm2_file(), compute_dtype="float32")


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    return Tokenizer(smollm2_file())
