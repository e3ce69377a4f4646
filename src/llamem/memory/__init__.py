"""Any program: traced, compiled for any chip."""

from llamem.memory.chip_names import available, find_chip
from llamem.memory.chips import CHIPS, Chip, compiling_for
from llamem.memory.compilers import fetch_compilers
from llamem.memory.compiling import compile_report, matmul_flops
from llamem.memory.host_memory import host_memory_limit
from llamem.memory.report import Buffer, Collective, Comparison, GiB, Report, compare
from llamem.memory.residuals import Residuals, saved_residuals

__all__ = [
    "CHIPS",
    "Buffer",
    "Chip",
    "Collective",
    "Comparison",
    "GiB",
    "Report",
    "Residuals",
    "available",
    "compare",
    "compile_report",
    "compiling_for",
    "fetch_compilers",
    "find_chip",
    "host_memory_limit",
    "matmul_flops",
    "saved_residuals",
]
