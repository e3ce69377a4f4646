"""One run: text or chats, steps, snapshots."""

from llamem.llama.host_memory import same_places
from llamem.llama.tokenizer import Tokenizer
from llamem.train.adapter_step import abstract_lora_step, init_lora_state, lora_losses, make_lora_step
from llamem.train.batch_loss import loss_fn
from llamem.train.batches import Batches
from llamem.train.chats import Chats, load_chats
from llamem.train.data import Corpus, load_corpus, unigram_entropy
from llamem.train.hosts import LostHost, initialize
from llamem.train.loop import train
from llamem.train.optimizers import stochastically_rounded
from llamem.train.run import Run
from llamem.train.settings import TrainSettings
from llamem.train.step import TrainState, abstract_state, abstract_step, init_state, make_model, make_train_step

__all__ = [
    "Batches",
    "Chats",
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
    "initialize",
    "load_chats",
    "load_corpus",
    "lora_losses",
    "loss_fn",
    "make_lora_step",
    "make_model",
    "make_train_step",
    "same_places",
    "stochastically_rounded",
    "train",
    "unigram_entropy",
]
