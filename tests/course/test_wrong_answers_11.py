"""Answers that a reader may well give to the exercises of notebook 11, and that are wrong: each is rejected."""

import math

import pytest
from answers import Answers, refuse

from llamem_course.exercises import scale_out


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


def by(hosts_of):
    """An answer that is right but for the number of hosts, which `hosts_of(step, hosts_from)` gives."""

    def answer(step, batch, hosts_from, host):
        hosts = hosts_of(step, hosts_from)
        first = step * batch + host * batch // hosts
        return range(first, first + batch // hosts) if host < hosts else []

    return answer


def counted_from_the_change(step, batch, hosts_from, host):
    first = max(first for first in hosts_from if first <= step)
    return by(lambda step, _: hosts_from[first])(step - first, batch, hosts_from, host)


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
    "in the order of the dictionary": (
        SEQUENCES,
        by(lambda step, hosts_from: hosts_from[[first for first in hosts_from if first <= step][-1]]),
        "who is host",
    ),
    "the fewest hosts": (SEQUENCES, by(lambda step, hosts_from: min(hosts_from.values())), "as many as the others"),
    "the nearest change": (
        SEQUENCES,
        by(lambda step, hosts_from: hosts_from[min(hosts_from, key=lambda first: abs(first - step))]),
        "as many as the others|nobody",
    ),
    "counted from the change": (SEQUENCES, counted_from_the_change, "earlier step"),
    "the last host first": (
        SEQUENCES,
        sequences(lambda s, b, n, h: s * b + (n - 1 - h) * b // n, lambda s, b, n, h: b // n),
        "another order",
    ),
    "one sequence too many": (
        SEQUENCES,
        sequences(lambda s, b, n, h: s * b + h * b // n, lambda s, b, n, h: b // n + 1),
        "same sequence",
    ),
    "a host that is gone": (SEQUENCES, host_that_is_gone, "who is host"),
    "nothing for a host that is gone": (
        SEQUENCES,
        lambda s, b, n, h: host_that_is_gone(s, b, n, h) if h < hosts_at(s, n) else None,
        "an empty list",
    ),
    "numbers with a fraction": (
        SEQUENCES,
        lambda step, batch, hosts_from, host: [float(number) for number in range(batch)],
        "interpreted as an integer",
    ),
    "a third gathering with remat": (
        PAR,
        lambda flops, link, n_bytes, remat: (4 if remat else 3) * n_bytes / link / ((8 if remat else 6) / flops),
        "backward pass has gathered",
    ),
    "one journey": (PAR, par(1, 8, 6), "One journey"),
    "no gradients": (PAR, par(2, 8, 6), "What travels in the backward pass"),
    "gradients there and back": (PAR, par(4, 8, 6), "Four journeys"),
    "nothing again": (PAR, par(3, 6, 6), "once more with remat"),
    "always again": (PAR, par(3, 8, 8), "once more with remat"),
    "the forward pass": (PAR, par(3, 2, 2), "forward pass alone"),
    "numbers, no bytes": (PAR, par(3, 8, 6, lambda n: 1), "how many travel"),
    "bits": (PAR, par(3, 8, 6, lambda n: 8 * n), "are not it"),
    "the backward pass alone": (PAR, par(2, 6, 4), "are not it|What travels"),
    "again without remat, and not with it": (PAR, par(3, 6, 8), "once more with remat"),
    "journeys by remat": (
        PAR,
        lambda flops, link, n, remat: (3 if remat else 2) * n / link * flops / (8 if remat else 6),
        "What travels in the backward pass",
    ),
    "two bytes": (PAR, par(3, 8, 6, lambda n: 2), "are not it"),
    "all weights of a model": (PAR, par(3 * 8e9, 8, 6), "cancels"),
    "the speeds swapped": (PAR, lambda flops, link, n, remat: 3 * n * link / flops, "Set them equal"),
    "every sum twice": (PAR, par(6, 8, 6), "Six journeys"),
    "gradients in float32": (PAR, par(1, 8, 6, lambda n: 2 * n + 4), "a gradient in float32"),
    "one chip's link": (PAR, lambda flops, link, n, remat: par(3, 8, 6)(flops, 600e9, n, remat), "are not it"),
    "one chip's speed": (PAR, lambda flops, link, n, remat: par(3, 8, 6)(275e12, link, n, remat), "are not it"),
    "the fourth pass twice": (PAR, par(3, 12, 6), "are not it"),
    "a list": (PAR, lambda *args: [1.0, 2.0], "one number"),
    "too few": (scale_out.check_mesh, lambda: {"fsdp": 32}, "64 chips"),
    "one sequence": (scale_out.check_mesh, lambda: {"context": 64}, "1 sequences: at least 16"),
    "too many": (scale_out.check_mesh, lambda: {"fsdp": 128}, "64 chips"),
    "one chip": (scale_out.check_mesh, lambda: {}, "64 chips"),
    "eight sequences": (scale_out.check_mesh, lambda: {"fsdp": 8, "context": 8}, "8 sequences: at least 16"),
    "sizes without names": (scale_out.check_mesh, lambda: [16, 4], "expected axes and their sizes"),
    "a mesh of no axes": (scale_out.check_mesh, lambda: {"model": 64}, "no mesh axis"),
}


def test_right_answers_are_accepted(capsys):
    SEQUENCES(sequences(lambda s, b, n, h: s * b + h * (b // n), lambda s, b, n, h: b // n))
    PAR(par(3, 8, 6))
    PAR(lambda *args: math.ceil(par(3, 8, 6)(*args)))
    assert capsys.readouterr().out.count("correct") == 3


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_gets_its_hint(name):
    refuse(WRONG[name])


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("mesh", "hint"),
    [
        ({"fsdp": 64}, "what else does a chip hold"),
        ({"fsdp": 16, "tensor": 4}, "which axis splits that"),
        ({"data": 2, "fsdp": 8, "context": 4}, "held whole by each part"),
    ],
)
def test_a_mesh_that_needs_too_much_is_refused(mesh, hint):
    with pytest.raises(AssertionError, match=hint):
        scale_out.check_mesh(lambda: mesh)
