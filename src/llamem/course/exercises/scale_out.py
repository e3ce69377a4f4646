"""Checks of the exercises of notebook 11."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan
from llamem.llama.sharding import MeshShape
from llamem.memory.chips import available, find_chip
from llamem.memory.compiling import compile_report
from llamem.memory.report import GiB
from llamem.train import TrainSettings, abstract_step
from llamem.train.batches import Batches


def check_my_sequences(fn: Callable[..., Any]) -> None:
    """Exercise 1: which sequences a host reads at a step."""

    def body() -> str:
        for batch_size, hosts in ((12, 1), (12, 2), (12, 3), (8, 8)):
            for step in (0, 1, 5):
                parts = [[int(number) for number in fn(step, batch_size, hosts, host)] for host in range(hosts)]
                whole, wanted = list(itertools.chain(*parts)), list(range(step * batch_size, (step + 1) * batch_size))
                where = f"At step {step}, for batches of {batch_size} on {hosts} hosts,"
                assert len(set(whole)) == len(whole), f"{where} two hosts read the same sequence."
                assert len(whole) >= batch_size, f"{where} some sequence of the batch is read by nobody."
                assert len(whole) <= batch_size, f"{where} the hosts read more than the batch: who divides it?"
                assert min(whole) >= step * batch_size, f"{where} a sequence of an earlier step is read again."
                assert set(whole) == set(wanted), f"{where} the batch is not that of one host: what follows a resume?"
                assert whole == wanted, f"{where} the rows lie in another order than on one host."
        tokens = np.arange(300, dtype=np.uint32)
        batches = Batches(tokens, 6, 10)
        rows = [batches.batch_at(2, slice(host * 3, host * 3 + 3)).inputs_BT for host in (0, 1)]
        assert (np.concatenate(rows) == batches.batch_at(2).inputs_BT).all()
        return "Every sequence once, in the order of one host: a run may go on with any number of them."

    grade(1, body)


def check_received_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 2: what a chip receives in a step because weights and their gradients are split."""

    def body() -> str:
        for weights, chips in ((16 * 10**9, 256), (141 * 10**9, 512), (10**6, 4), (10**6, 1)):
            got, others = fn(weights, chips), weights * (chips - 1) / chips
            if np.isclose(got, 3 * others, rtol=1e-9):
                continue
            assert got or chips == 1, "Zero? A chip holds one part, and computes with all of them."
            assert not np.isclose(got, 3 * weights), "Nobody sends a chip the part that it holds."
            assert not np.isclose(got, 2 * others), (
                "The weights arrive twice. What travels in the backward pass as well?"
            )
            assert not np.isclose(got, others), "Rematerialisation: the backward pass computes layers again. With what?"
            assert not np.isclose(got, 3 * weights / chips), "That is three times what it holds, not what it lacks."
            raise AssertionError(
                f"For {weights:,} bytes on {chips} chips, it is not {got:,.0f}. How often do all other parts travel?"
            )
        return "It does not fall with the number of chips, while the work of each chip does: there communication wins."

    grade(2, body)


def check_mesh(fn: Callable[..., Any]) -> None:
    """Exercise 3: Llama 3.1 70B on 64 v5p chips, by their compiler."""

    def body() -> str:
        mesh = MeshShape.of(fn())
        assert mesh.devices == 64, f"The slice has 64 chips; your mesh has {mesh.devices}."
        batch = mesh.data * mesh.fsdp
        assert mesh.data == 1, "Along data= every chip holds the weights whole: which axis splits them?"
        settings = TrainSettings(batch_size=batch, seq_len=8192)
        config = LlamaConfig.from_name("llama3.1-70b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        step, state, shapes = abstract_step(config, settings, Plan(mesh=mesh))
        if not available("v5p:4x4x4"):
            return "(Not compiled: there is no TPU compiler here, so the peak is not checked.)"
        report = compile_report(step, state, shapes, donate_argnums=(0,), chip="v5p:4x4x4")
        peak = report.peak_bytes / GiB
        assert peak < 21, (
            f"The peak is {peak:.1f} GiB a chip. Weights and moments are split as far as they go: what else "
            "does a chip hold that another axis would split?"
        )
        return f"Peak {peak:.1f} GiB a chip, of {(find_chip('v5p:4x4x4').capacity_bytes or 0) / GiB:.1f}."

    grade(3, body)
