"""Answers that a reader may well give to the exercises of notebook 11, and that are wrong: each is rejected."""

from collections.abc import Callable
from typing import Any

import pytest

from llamem import available
from llamem.course.exercises import scale_out

WRONG: dict[str, tuple[Callable[..., None], Callable[..., Any], str]] = {
    "everybody reads the batch": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range(step * batch, (step + 1) * batch),
        "two hosts read the same",
    ),
    "hosts do not matter": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range(step * batch, step * batch + batch // hosts),
        "two hosts read the same",
    ),
    "one each": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: [step * batch + host],
        "read by nobody",
    ),
    "a batch for each host": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range((step * hosts + host) * batch, (step * hosts + host + 1) * batch),
        "more than the batch",
    ),
    "a text for each host": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range(
            host * 1000 + step * batch // hosts, host * 1000 + (step + 1) * batch // hosts
        ),
        "",
    ),
    "in turns": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range(step * batch + host, (step + 1) * batch, hosts),
        "another order",
    ),
    "forgets the step": (
        scale_out.check_my_sequences,
        lambda step, batch, hosts, host: range(host * batch // hosts, (host + 1) * batch // hosts),
        "earlier step",
    ),
    "all weights": (scale_out.check_received_bytes, lambda weights, chips: 3 * weights, "part that it holds"),
    "once": (scale_out.check_received_bytes, lambda weights, chips: weights * (chips - 1) / chips, "Rematerialisation"),
    "no gradients": (
        scale_out.check_received_bytes,
        lambda weights, chips: 2 * weights * (chips - 1) / chips,
        "backward pass",
    ),
    "its own part": (scale_out.check_received_bytes, lambda weights, chips: 3 * weights / chips, "what it lacks"),
    "nothing": (scale_out.check_received_bytes, lambda weights, chips: 0, "computes with all"),
    "twice what it holds": (scale_out.check_received_bytes, lambda weights, chips: 2 * weights / chips, "How often"),
    "too few": (scale_out.check_mesh, lambda: {"fsdp": 32}, "64 chips"),
    "copies": (scale_out.check_mesh, lambda: {"data": 4, "fsdp": 16}, "weights whole"),
    "too many": (scale_out.check_mesh, lambda: {"fsdp": 128}, "64 chips"),
    "one chip": (scale_out.check_mesh, lambda: {}, "64 chips"),
    "half copies": (scale_out.check_mesh, lambda: {"data": 2, "fsdp": 32}, "weights whole"),
    "a mesh of no axes": (scale_out.check_mesh, lambda: {"model": 64}, "no mesh axis"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_gets_its_hint(name):
    check, answer, hint = WRONG[name]
    with pytest.raises(AssertionError, match=hint) as error:
        check(answer)
    assert len(str(error.value).split()) > 5


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(not available("v5p:4x4x4"), reason="needs libtpu")
def test_fsdp_alone_needs_too_much():
    with pytest.raises(AssertionError, match="what else does a chip hold"):
        scale_out.check_mesh(lambda: {"fsdp": 64})
