"""Before a run: what will it cost, and which plan is best."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.planner.estimates import Estimate, Line, estimate
    from llamem.planner.result import Found
    from llamem.planner.roofline import CHIP_LINK, HOST_LINK, INSIDE, NETWORK, PRODUCTS, Pace, pace
    from llamem.planner.search import find_plan, longest_context

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
