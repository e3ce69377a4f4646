"""Before a run: what will it cost, and which plan is best."""

from llamem.planner.asking import NothingFits
from llamem.planner.estimates import Estimate, estimate
from llamem.planner.fitting import Fitting, find_fitting, largest, options
from llamem.planner.found import Found
from llamem.planner.links import CHIP_LINK, HOST_LINK, INSIDE, NETWORK
from llamem.planner.pods import Pace, pace
from llamem.planner.question import chip_called
from llamem.planner.search import find_plan, longest_context
from llamem.planner.seconds import PRODUCTS
from llamem.planner.sums import LINES, Line

__all__ = [
    "CHIP_LINK",
    "HOST_LINK",
    "INSIDE",
    "LINES",
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
