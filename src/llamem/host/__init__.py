"""Weights, moments and layers' inputs that wait in the host's memory, and the step that fetches them."""

from llamem.host.memory import same_places

__all__ = ["same_places"]
