"""Where a plan's step runs: the one choice among the powers that put other weights in the place of plain ones."""

from llamem.host.waiting_weights import OnHost
from llamem.llama.plan import Plan
from llamem.mesh.mesh_step import OnMesh
from llamem.train.plain_step import OneDevice


def place_of(plan: Plan) -> OneDevice:
    """Return what a step of this plan asks."""
    if plan.mesh.devices > 1:
        return OnMesh(plan.mesh)
    return OnHost(plan) if "host" in (plan.weights, plan.moments) else OneDevice()
