"""The plain training step, and what a run reads and writes: text, chats, batches, snapshots."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.train.chats import Chats, load_chats
    from llamem.train.data import Batches, Corpus, load_corpus, unigram_entropy
    from llamem.train.hosts import LostHost, initialize
    from llamem.train.optimizers import stochastically_rounded
    from llamem.train.plain_step import TrainState, make_model
    from llamem.train.settings import TrainSettings

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
