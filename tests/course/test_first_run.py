import math

import numpy as np
import pytest

from jaxmem import chip_called
from llamem.train import Batches
from llamem_course.first_run import counting_losses, run_for


def test_counts_of_pairs_know_what_follows_and_counts_of_tokens_know_shares():
    text = np.array([0, 1, 2, 1] * 200 + [0], np.int32)  # after 0 and 2 comes 1; after 1 either; 3 never comes
    batches = Batches(text, batch_size=2, seq_len=20)
    found = counting_losses(batches, 20, Batches(text[:201], batch_size=2, seq_len=20), judges=5, vocab_size=4)
    shares = [(count + 0.03) / 800.12 for count in (200, 400, 200)]
    tokens = -sum(part * math.log(p) for part, p in zip((0.25, 0.5, 0.25), shares, strict=True))
    pairs = -(0.5 * math.log((200 + 3 * shares[1]) / 203) + 0.5 * math.log((200 + 3 * shares[0]) / 403))
    names = "knowing nothing", "counting single tokens", "counting pairs"
    assert found == pytest.approx(dict(zip(names, (math.log(4), tokens, pairs), strict=True)))


@pytest.mark.parametrize(("chip", "layers"), [("v5e-1", 12), ("t4", 12), ("h100", 16)])
def test_a_device_gets_a_model_that_is_worth_it_and_what_is_wished_comes_first(chip, layers):
    config, settings = run_for(chip_called(chip), "auto", {"steps": 7, "seq_len": None})
    assert config.n_layers == layers and settings.steps == 7 and settings.seq_len >= 1024
    assert run_for(chip_called(chip), "tiny", {})[0].n_layers == 4
