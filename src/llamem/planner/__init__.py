"""Before a run: what will it cost, and which plan is best."""

from llamem.memory.chip_names import chip_called
from llamem.planner.estimates import Estimate, estimate
from llamem.planner.fitting import Fitting, NothingFits, find_fitting, largest, options
from llamem.planner.found import Found
from llamem.planner.roofline import CHIP_LINK, HOST_LINK, INSIDE, NETWORK, PRODUCTS, Pace, pace
from llamem.planner.search import find_plan, longest_context
from llamem.planner.sums import Line

__all__ = [
    "CHIP_LINK",
    "HOST_LINK",
    "INSIDE",
    "NETWORK",
    "PRODUCTS",
    "Estimate",
    "Fitting",
    "Found",
    "Line",
    "NothingFits",
    "Pace",
    "chip_called",
    "estimate",
    "find_fitting",
    "find_plan",
    "largest",
    "longest_context",
    "options",
    "pace",
]
