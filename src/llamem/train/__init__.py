"""One run: text or chats, steps, snapshots.

Names are imported when they are asked for: the plain step then loads none of the powers that a plan may choose.
"""

import importlib
from typing import Any

_MODULES = {
    "llamem.adapters.step": ("abstract_lora_step", "init_lora_state", "lora_losses", "make_lora_step"),
    "llamem.host.memory": ("same_places",),
    "llamem.llama.tokenizer": ("Tokenizer",),
    "llamem.train.batches": ("Batches",),
    "llamem.train.chats": ("Chats", "load_chats"),
    "llamem.train.data": ("Corpus", "load_corpus", "unigram_entropy"),
    "llamem.train.hosts": ("LostHost", "initialize"),
    "llamem.train.loop": ("train",),
    "llamem.train.optimizers": ("stochastically_rounded",),
    "llamem.train.planned": ("abstract_state", "abstract_step", "init_state", "loss_fn", "make_train_step"),
    "llamem.train.run": ("Run",),
    "llamem.train.settings": ("TrainSettings",),
    "llamem.train.step": ("TrainState", "make_model"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
