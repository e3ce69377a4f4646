"""The plain training step, and what a run reads and writes: text, chats, batches, snapshots."""

from llamem.train.chats import Chats, load_chats
from llamem.train.data import Batches, Corpus, load_corpus, unigram_entropy
from llamem.train.hosts import LostHost, initialize
from llamem.train.optimizers import stochastically_rounded
from llamem.train.plain_step import TrainState, make_model
from llamem.train.settings import TrainSettings

__all__ = [
    "Batches",
    "Chats",
    "Corpus",
    "LostHost",
    "TrainSettings",
    "TrainState",
    "initialize",
    "load_chats",
    "load_corpus",
    "make_model",
    "stochastically_rounded",
    "unigram_entropy",
]
