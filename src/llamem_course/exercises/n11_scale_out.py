"""The exercises of notebook 11: tokens at par, a mesh that fits."""

from functools import partial
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
from llamem_course.exercises.exercise import Answer, Exercise


def _at_par(
    flops: float, link: float, n_bytes: float, remat: bool, *, times: float = 3, forward: int = 2, backward: int = 4
) -> float:
    return (times * n_bytes / link) / ((backward + forward * (1 + remat)) / flops)


def _tokens(answer: Answer, *given: Any) -> Any:
    found = answer(*given)
    assert found is not None and np.ndim(found) == 0, "return one number of tokens."
    right = _at_par(*given)
    assert 1e-3 < found / right < 1e3, (
        f"{found:.3g} tokens? Messages take bytes / link, products FLOPs / flops. Set them equal for one weight: how "
        f"many there are cancels."
    )
    return found


check_tokens_at_par = Exercise(
    1,
    _at_par,
    {
        f"Products {case[0]:.3g} FLOP/s, link {case[1]:.3g} bytes/s, {case[2]} bytes, remat={case[3]}": case
        for case in (
            (275e12, 600e9, 4, False),
            (593e12, 450e9, 2, False),
            (275e12, 600e9, 2, True),
            (118e12, 200e9, 4, True),
        )
    },
    "Neither the model's size nor the number of chips came up: only the tokens on each.",
    {
        "return one number of tokens": lambda *given: [1.0, 2.0],
        "Set them equal for one weight": [
            lambda *given: 8e9 * _at_par(*given),
            lambda flops, link, n_bytes, remat: 3 * n_bytes * link / flops,
        ],
        "Do the weights arrive once? In which passes are they needed, and what travels in the last?": (
            partial(_at_par, times=1)
        ),
        "The weights arrive twice. What travels in the backward pass as well?": partial(_at_par, times=2),
        "Four times? After a reduce-scatter each chip has its part of a gradient: does anybody need it whole?": (
            partial(_at_par, times=4)
        ),
        "Six times? Count how often all weights arrive on a chip, or leave it, in one step. Or three operations? A "
        "multiplication and an addition are two FLOPs.": partial(_at_par, times=6),
        "Is it a gradient in float32? It has n_bytes a number, as the weights have.": (
            lambda flops, link, n_bytes, remat: _at_par(flops, link, 2 * n_bytes + 4, remat, times=1)
        ),
        "That is the forward pass alone. How many FLOPs has a whole step?": (
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes, False, backward=0)
        ),
        "A number has more than one byte: how many travel?": [
            lambda flops, link, n_bytes, remat: _at_par(flops, link, 1, remat),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes**2, remat),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, 8 * n_bytes, remat),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, 2, remat),
        ],
        "Which FLOPs are done once more with remat, and only then? That work uses weights that the backward pass has "
        "gathered. (Did you count the passes one by one? Here all matmuls of a step stand against all its messages.)": [
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes, False),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes, True),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes, not remat),
            lambda flops, link, n_bytes, remat: _at_par(flops, link, n_bytes, remat, times=3 + remat),
        ],
        "Is a speed of one chip written into your answer?": [
            lambda flops, link, n_bytes, remat: _at_par(275e12, link, n_bytes, remat),
            lambda flops, link, n_bytes, remat: _at_par(flops, 600e9, n_bytes, remat),
        ],
    },
    otherwise="Count both sides for one weight.",
    ask=_tokens,
    told=lambda got, *_: f"{got:,.0f} tokens are not it.",
    rtol=1e-4,
    accepts=lambda got, right: abs(got - right) <= 1,  # rounded to a whole token
)


def _fits(answer: Answer) -> str:
    mesh = MeshShape.of(answer())
    assert mesh.devices == 64, f"the slice has 64 chips; your mesh has {mesh.devices}."
    batch = mesh.data * mesh.fsdp
    assert batch >= 16, f"your mesh has {batch} parts of the batch, so {batch} sequences: at least 16 are asked for."
    assert available("v5e:8x8"), "it was not checked: the peak is the TPU compiler's word, and there is none here."
    config = LlamaConfig.from_name("llama3.1-70b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    step, state, shapes = abstract_step(config, TrainSettings(batch_size=batch, seq_len=8192), Plan(mesh=mesh))
    report = compile_report(step, state, shapes, donate_argnums=(0,), chip="v5e:8x8")
    sizes = f"{report.peak_bytes / GiB:.1f} GiB a chip, of {(report.capacity_bytes or 0) / GiB:.2f}"
    copies = " Along data= weights and moments are held whole by each part." if mesh.data > 1 else ""
    assert report.fits, (
        f"the peak is {sizes}.{copies} Weights and moments can be split as far as there are chips: what else does a "
        f"chip hold, and which axis splits that?"
    )
    return f"Peak {sizes}."


check_mesh = Exercise(
    2,
    lambda: {"fsdp": 16, "context": 4},
    {},
    _fits,
    {
        "the slice has 64 chips": [lambda: {"fsdp": 32}, lambda: {"fsdp": 128}, lambda: {}],
        "at least 16 are asked for": [lambda: {"context": 64}, lambda: {"fsdp": 8, "context": 8}],
        "expected axes and their sizes": lambda: [16, 4],
        "no mesh axis": lambda: {"model": 64},
    },
)
