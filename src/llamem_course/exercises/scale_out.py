"""Checks of the exercises of notebook 11."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.chips.names import available
from jaxmem.compiling import compile_report
from jaxmem.report import GiB
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import MeshShape, Plan
from llamem.runs import abstract_step
from llamem.train import TrainSettings
from llamem_course.exercises import grade


def check_my_sequences(fn: Callable[..., Any]) -> None:
    """Exercise 2: which sequences a host reads at a step of a run whose number of hosts changes."""

    def body() -> str:
        runs = ((12, {0: 4, 100: 2}), (12, {0: 2, 7: 3, 50: 6}), (8, {0: 8}), (6, {5: 1, 0: 3}))
        for batch_size, hosts_from in runs:
            changes = {step + near for step in hosts_from for near in (-1, 0, 1)}
            for step in sorted(step for step in changes | {3, 200} if step >= 0):
                hosts = hosts_from[max(first for first in hosts_from if first <= step)]
                everybody = range(max(hosts_from.values()))
                answers = [fn(step, batch_size, dict(hosts_from), host) for host in everybody]
                assert not any(answer is None for answer in answers), "return numbers in order; an empty list for none"
                parts = [[operator.index(number) for number in answer] for answer in answers]
                _compare(parts, step, batch_size, hosts, hosts_from)
        return "Every sequence once, in the order of one host, whoever is there to read it."

    grade(2, body)


def _compare(parts: list[list[int]], step: int, batch_size: int, hosts: int, hosts_from: dict[int, int]) -> None:
    whole, wanted = list(itertools.chain(*parts)), list(range(step * batch_size, (step + 1) * batch_size))
    where = f"At step {step} of a run with hosts {hosts_from}, for batches of {batch_size},"
    gone = [host for host, part in enumerate(parts) if part and host >= hosts]
    assert not gone, f"{where} there are {hosts} hosts: who is host {gone[0]}?"
    assert len(set(whole)) == len(whole), f"{where} two hosts read the same sequence."
    assert len(whole) >= batch_size, f"{where} some sequence of the batch is read by nobody."
    assert len(whole) <= batch_size, f"{where} the hosts read more than the batch: who divides it?"
    assert min(whole) >= step * batch_size, f"{where} a sequence of an earlier step is read again."
    assert set(whole) == set(wanted), f"{where} the batch is not that of one host: does its place depend on the hosts?"
    assert whole == wanted, f"{where} the rows lie in another order than on one host."
    sizes = {len(part) for part in parts[:hosts]}
    assert len(sizes) == 1, f"{where} hosts read {sorted(sizes)} sequences: each is to read as many as the others."


def check_tokens_at_par(fn: Callable[..., float]) -> None:
    """Exercise 1: tokens on each chip from which on products take as long as messages, under FSDP."""

    def body() -> str:
        for flops, link, n_bytes, remat in (
            (275e12, 600e9, 4, False),  # the order tells apart what is four thirds of the answer, by the hints below
            (593e12, 450e9, 2, False),
            (275e12, 600e9, 2, True),
            (118e12, 200e9, 4, True),
        ):
            found = fn(flops, link, n_bytes, remat)
            assert found is not None and np.ndim(found) == 0, "return one number of tokens"
            right = (3 * n_bytes / link) / ((8 if remat else 6) / flops)
            again = (
                "Which FLOPs are done once more with remat, and only then? That work uses weights that the "
                "backward pass has gathered."
            )
            four_thirds = {
                (4, False): "Four journeys? A gradient is summed once, and nobody asks for it whole.",
                (2, False): "Is it a gradient in float32? It has n_bytes a number, as the weights have.",
            }
            hints = {
                1 / 3: "One journey of the weights? In which passes are they needed, and what travels in the last?",
                n_bytes: "A number has more than one byte: how many travel?",
                1 / n_bytes: "A number has more than one byte: how many travel?",
                4 / 3: four_thirds.get((n_bytes, remat), again),
                (8 if remat else 6) / 2: "That is the forward pass alone. How many FLOPs has a whole step?",
            }
            if not remat:
                hints[2.0] = (
                    "Six journeys? Count how often all weights come to a chip, or leave it, in one step. Or three "
                    "operations? A multiplication and an addition are two FLOPs."
                )
                hints[2 / 3] = "The weights arrive twice. What travels in the backward pass as well?"
            if n_bytes == 4:
                hints[3 / 4] = again
            case = f"products {flops:.3g} FLOP/s, link {link:.3g} bytes/s, {n_bytes} bytes, remat={remat}"
            assert 1e-3 < found / right < 1e3, (
                f"{case}: {found:.3g} tokens? Messages take bytes / link, products FLOPs / flops. Set them equal "
                "for one weight: how many there are cancels"
            )
            for ratio, hint in hints.items():
                assert not np.isclose(found, ratio * right, rtol=1e-3), f"{case}: {hint}"
            assert abs(found - right) <= 1, (  # rounded to a whole token
                f"{case}: {found:,.0f} tokens are not it. Count both sides for one weight"
            )
        return "Neither the model's size nor the number of chips came up: only the tokens on each."

    grade(1, body)


def check_mesh(fn: Callable[..., Any]) -> None:
    """Exercise 3: Llama 3.1 70B on 64 v5e chips, by their compiler."""

    def body() -> str:
        mesh = MeshShape.of(fn())
        assert mesh.devices == 64, f"The slice has 64 chips; your mesh has {mesh.devices}."
        batch = mesh.data * mesh.fsdp
        assert batch >= 16, (
            f"Your mesh has {batch} parts of the batch, so {batch} sequences: at least 16 are asked for."
        )
        settings = TrainSettings(batch_size=batch, seq_len=8192)
        config = LlamaConfig.from_name("llama3.1-70b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        step, state, shapes = abstract_step(config, settings, Plan(mesh=mesh))
        if not available("v5e:8x8"):
            raise AssertionError("It was not checked: the peak is the TPU compiler's word, and there is none here.")
        report = compile_report(step, state, shapes, donate_argnums=(0,), chip="v5e:8x8")
        sizes = f"{report.peak_bytes / GiB:.1f} GiB a chip, of {(report.capacity_bytes or 0) / GiB:.2f}"
        copies = " Along data= weights and moments are held whole by each part." if mesh.data > 1 else ""
        assert report.fits, (
            f"The peak is {sizes}.{copies} Weights and moments can be split as far as there are chips: what else does "
            "a chip hold, and which axis splits that?"
        )
        return f"Peak {sizes}."

    grade(3, body)
