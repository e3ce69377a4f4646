"""What a step asks where weights or moments wait in the host's memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

from llamem.host.by_parts import update_by_parts
from llamem.host.weights import wait_on_host
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.train.place import OneDevice


@dataclasses.dataclass(frozen=True)
class OnHost(OneDevice):
    """One device, and beside it what the plan leaves on the host."""

    plan: Plan

    def put(self, model: Llama) -> Llama:
        """Return the model with weights that are fetched where they are used."""
        return wait_on_host(model) if self.plan.weights == "host" else model

    def update(self, rule: Callable[..., Any], grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
        """Return new parameters and moments, part by part where they wait on the host."""
        if self.plan.moments == "device":
            return rule(grads, moments, params)
        return update_by_parts(rule, self.plan, grads, moments, params)
