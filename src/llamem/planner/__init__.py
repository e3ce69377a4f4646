"""Before a run: what will it cost, and which plan is best."""

from llamem.planner.estimates import Estimate, Line, estimate
from llamem.planner.result import Found
from llamem.planner.roofline import CHIP_LINK, HOST_LINK, INSIDE, NETWORK, PRODUCTS, Pace, pace
from llamem.planner.search import find_plan, longest_context

__all__ = [
    "CHIP_LINK",
    "HOST_LINK",
    "INSIDE",
    "NETWORK",
    "PRODUCTS",
    "Estimate",
    "Found",
    "Line",
    "Pace",
    "estimate",
    "find_plan",
    "longest_context",
    "pace",
]
