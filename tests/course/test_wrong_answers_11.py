"""Answers that a reader may well give to the exercises of notebook 11, and that are wrong: each is rejected."""

import pytest
from answers import Answers, refuse

from llamem.course.exercises import scale_out


def hosts_at(step, hosts_from):
    return hosts_from[max(first for first in hosts_from if first <= step)]


def sequences(first_of, count_of):
    """An answer that reads so many sequences from a first one on, both of (step, batch, hosts, host)."""

    def answer(step, batch, hosts_from, host):
        at = step, batch, hosts_at(step, hosts_from), host
        return range(first_of(*at), first_of(*at) + count_of(*at)) if host < at[2] else []

    return answer


def of_the_first_hosts(step, batch, hosts_from, host):
    share = batch // hosts_from[0]
    return range(step * batch + host * share, step * batch + (host + 1) * share)


def of_the_last_change(step, batch, hosts_from, host):
    hosts = list(hosts_from.values())[-1]
    return (
        range(step * batch + host * batch // hosts, step * batch + (host + 1) * batch // hosts) if host < hosts else []
    )


def changed_a_step_late(step, batch, hosts_from, host):
    hosts = hosts_at(max(step - 1, 0), hosts_from)
    return (
        range(step * batch + host * batch // hosts, step * batch + (host + 1) * batch // hosts) if host < hosts else []
    )


def host_that_is_gone(step, batch, hosts_from, host):
    share = batch // hosts_at(step, hosts_from)
    return range(step * batch + host * share, step * batch + (host + 1) * share)


def in_turns(step, batch, hosts_from, host):
    hosts = hosts_at(step, hosts_from)
    return range(step * batch + host, (step + 1) * batch, hosts) if host < hosts else []


def par(journeys, with_remat, without, bytes_of=lambda n_bytes: n_bytes):
    return lambda flops, link, n, remat: journeys * bytes_of(n) / link * flops / (with_remat if remat else without)


SEQUENCES, PAR = scale_out.check_my_sequences, scale_out.check_tokens_at_par
WRONG: Answers = {
    "everybody reads the batch": (
        SEQUENCES,
        sequences(lambda s, b, n, h: s * b, lambda s, b, n, h: b),
        "same sequence",
    ),
    "hosts do not matter": (SEQUENCES, sequences(lambda s, b, n, h: s * b, lambda s, b, n, h: b // n), "same sequence"),
    "one each": (SEQUENCES, sequences(lambda s, b, n, h: s * b + h, lambda s, b, n, h: 1), "read by nobody"),
    "a batch for each": (SEQUENCES, sequences(lambda s, b, n, h: (s * n + h) * b, lambda s, b, n, h: b), "more than"),
    "forgets the step": (
        SEQUENCES,
        sequences(lambda s, b, n, h: h * b // n, lambda s, b, n, h: b // n),
        "earlier step|not that of one host",
    ),
    "a text for each host": (
        SEQUENCES,
        sequences(lambda s, b, n, h: h * 9000 + s * b // n, lambda s, b, n, h: b // n),
        "not that of one host|earlier step",
    ),
    "in turns": (SEQUENCES, in_turns, "another order"),
    "the first number of hosts": (SEQUENCES, of_the_first_hosts, "who is host|nobody|more than"),
    "the last number of hosts": (SEQUENCES, of_the_last_change, "as many as the others|nobody|who is host"),
    "a step late": (SEQUENCES, changed_a_step_late, "who is host|nobody"),
    "a host that is gone": (SEQUENCES, host_that_is_gone, "who is host"),
    "one journey": (PAR, par(1, 8, 6), "One journey"),
    "no gradients": (PAR, par(2, 8, 6), "What travels in the backward pass"),
    "gradients there and back": (PAR, par(4, 8, 6), "Four journeys"),
    "nothing again": (PAR, par(3, 6, 6), "once more with remat"),
    "always again": (PAR, par(3, 8, 8), "once more with remat"),
    "the forward pass": (PAR, par(3, 2, 2), "forward pass alone"),
    "numbers, no bytes": (PAR, par(3, 8, 6, lambda n: 1), "how many travel"),
    "two bytes": (PAR, par(3, 8, 6, lambda n: 2), "are not it"),
    "a list": (PAR, lambda *args: [1.0, 2.0], "one number"),
    "too few": (scale_out.check_mesh, lambda: {"fsdp": 32}, "64 chips"),
    "copies": (scale_out.check_mesh, lambda: {"data": 4, "fsdp": 16}, "weights whole"),
    "too many": (scale_out.check_mesh, lambda: {"fsdp": 128}, "64 chips"),
    "one chip": (scale_out.check_mesh, lambda: {}, "64 chips"),
    "half copies": (scale_out.check_mesh, lambda: {"data": 2, "fsdp": 32}, "weights whole"),
    "a mesh of no axes": (scale_out.check_mesh, lambda: {"model": 64}, "no mesh axis"),
}


def test_right_answers_are_accepted(capsys):
    SEQUENCES(sequences(lambda s, b, n, h: s * b + h * (b // n), lambda s, b, n, h: b // n))
    PAR(par(3, 8, 6))
    assert capsys.readouterr().out.count("correct") == 2


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_gets_its_hint(name):
    refuse(WRONG[name])


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_fsdp_alone_needs_too_much():
    with pytest.raises(AssertionError, match="what else does a chip hold"):
        scale_out.check_mesh(lambda: {"fsdp": 64})
