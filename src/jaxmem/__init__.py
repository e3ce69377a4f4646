"""What any JAX program needs of a chip's memory, by that chip's compiler; proofs of rematerialisation; what fits."""

from importlib import metadata
from typing import TYPE_CHECKING

from jaxmem import _startup as _startup  # isort: split

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from jaxmem.chips.chip import CHIPS, Chip, compiling_for, host_memory_limit
    from jaxmem.chips.compilers import fetch_compilers
    from jaxmem.chips.names import available, chip_called, find_chip
    from jaxmem.compiling import compile_report, matmul_flops
    from jaxmem.fitting import Fitting, NothingFits, find_fitting, keep_what_fits, largest, options
    from jaxmem.reading.hlo import Buffer, Collective
    from jaxmem.report import Comparison, GiB, Report, compare
    from jaxmem.torch_modules import from_torch
    from jaxmem.tracing.residuals import Residuals, saved_residuals
    from jaxmem.verify.comparisons import Proof, Title
    from jaxmem.verify.verification import Verification, assert_remat, verify_remat

# The same for whoever runs: a name is imported when it is asked for.
_NAMES = {
    "jaxmem.chips.chip": ("CHIPS", "Chip", "compiling_for", "host_memory_limit"),
    "jaxmem.chips.compilers": ("fetch_compilers",),
    "jaxmem.chips.names": ("available", "chip_called", "find_chip"),
    "jaxmem.compiling": ("compile_report", "matmul_flops"),
    "jaxmem.fitting": ("Fitting", "NothingFits", "find_fitting", "keep_what_fits", "largest", "options"),
    "jaxmem.reading.hlo": ("Buffer", "Collective"),
    "jaxmem.report": ("Comparison", "GiB", "Report", "compare"),
    "jaxmem.torch_modules": ("from_torch",),
    "jaxmem.tracing.residuals": ("Residuals", "saved_residuals"),
    "jaxmem.verify.comparisons": ("Proof", "Title"),
    "jaxmem.verify.verification": ("Verification", "assert_remat", "verify_remat"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
__version__ = metadata.version("llamem")
