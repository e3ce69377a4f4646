"""A model asks its weights: what answers the questions, and shows no array, stands in a plain weight's place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import SMALL, model_of, tokens_of

from llamem.llama.weights import MATRICES, linear_together
from llamem.train.plain_step import mean_weights, summed_loss


class Asked(nnx.Module):
    """The base's answers, and nothing else of it."""

    is_trained, is_whole, tells_sequences_apart, vocab_axis = True, True, False, None

    def __init__(self, base):
        self.hidden_away = base

    def ready(self, dtype):
        return Asked(self.hidden_away.ready(dtype))

    def linear(self, x, dtype=None):
        return self.hidden_away.linear(x, dtype)

    def total(self, out):
        return self.hidden_away.total(out)

    def cut(self, n, axis):
        return Asked(self.hidden_away.cut(n, axis))

    @classmethod
    def together(cls, matrices, x):
        return linear_together([matrix.hidden_away for matrix in matrices], x)

    def look_up(self, ids, dtype):
        return self.hidden_away.look_up(ids, dtype)

    def beside(self, x):
        return self.hidden_away.beside(x)


def in_place(model):
    model = nnx.clone(model)
    for name in MATRICES:
        setattr(model.blocks, name, Asked(getattr(model.blocks, name)))
    model.embedding, model.untied_head = Asked(model.embedding), Asked(model.untied_head)
    return model


@pytest.mark.quick
@pytest.mark.parametrize("plan", [{}, {"head_groups": 2, "mlp_tiles": 3}], ids=["plain", "groups and tiles"])
def test_whatever_answers_the_questions_computes_like_a_plain_weight(plan):
    plain, tokens = model_of(SMALL, **plan), tokens_of(SMALL, T=13)
    asked = in_place(plain)
    np.testing.assert_array_equal(asked(tokens), plain(tokens))
    last, _ = asked.decode(tokens, asked.empty_cache(2, 16))
    np.testing.assert_array_equal(last, plain.decode(tokens, plain.empty_cache(2, 16))[0])

    def gradients(model):
        graphdef, params = nnx.split(model)
        batch = mean_weights(tokens[:, 1:]), tokens[:, :-1], tokens[:, 1:]
        return jax.tree.leaves(jax.grad(lambda params: summed_loss(nnx.merge(graphdef, params), *batch))(params))

    ours, theirs = gradients(asked), gradients(plain)
    assert len(ours) == len(theirs) and all(bool(jnp.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True))
