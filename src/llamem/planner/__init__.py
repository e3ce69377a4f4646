"""Before a run: what will it cost, and which plan is best."""

from llamem.planner.estimates import Estimate, estimate
from llamem.planner.ledger import Ledger
from llamem.planner.search import Found, NothingFits, ask, find_plan, largest_batch, longest_context, smallest_chip

__all__ = [
    "Estimate",
    "Found",
    "Ledger",
    "NothingFits",
    "ask",
    "estimate",
    "find_plan",
    "largest_batch",
    "longest_context",
    "smallest_chip",
]
