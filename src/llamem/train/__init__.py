"""One run: text, steps, snapshots."""

from llamem.llama.tokenizer import Tokenizer
from llamem.train.adapter_step import abstract_lora_step, init_lora_state, lora_loss, make_lora_step
from llamem.train.data import Batches, Corpus, load_corpus, unigram_entropy
from llamem.train.hosts import initialise
from llamem.train.loop import Run, train
from llamem.train.lost_hosts import LostHost
from llamem.train.step import (
    TrainSettings,
    TrainState,
    abstract_state,
    abstract_step,
    init_state,
    loss_fn,
    make_model,
    make_train_step,
)

__all__ = [
    "Batches",
    "Corpus",
    "LostHost",
    "Run",
    "Tokenizer",
    "TrainSettings",
    "TrainState",
    "abstract_lora_step",
    "abstract_state",
    "abstract_step",
    "init_lora_state",
    "init_state",
    "initialise",
    "load_corpus",
    "lora_loss",
    "loss_fn",
    "make_lora_step",
    "make_model",
    "make_train_step",
    "train",
    "unigram_entropy",
]
