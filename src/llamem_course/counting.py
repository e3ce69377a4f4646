"""What a table reaches that only counts which token follows which: a loss to hold a model's against."""

from collections import Counter

import numpy as np

from llamem.train import Batches


def loss_of_pairs(batches: Batches, steps: int, heldout: Batches, eval_batches: int, vocab_size: int) -> float:
    """Count the pairs of tokens in the batches of so many steps; return the table's mean loss on the text held out.

    Where pairs that begin with a token are rare, the share of the single next token decides. The two constants, 0.05
    and 100, were chosen on the text held out, which favours the table.
    """
    tokens, following = _tokens_and_next(batches, steps)
    times, times_of_pair = Counter(tokens), Counter(zip(tokens, following, strict=True))
    share_V = np.bincount(np.array(following, int), minlength=vocab_size) + 0.05  # no token has share 0
    share_V = share_V / share_V.sum()
    chances = [
        (times_of_pair[i, j] + 100 * share_V[j]) / (times[i] + 100)
        for i, j in zip(*_tokens_and_next(heldout, eval_batches), strict=True)
    ]
    return float(-np.mean(np.log(chances)))


def _tokens_and_next(batches: Batches, steps: int) -> tuple[list[int], list[int]]:
    examples = [batches.batch_at(step) for step in range(steps)]
    tokens = [int(token) for inputs_BT, _ in examples for token in np.ravel(inputs_BT)]
    following = [int(token) for _, targets_BT in examples for token in np.ravel(targets_BT)]
    return tokens, following
