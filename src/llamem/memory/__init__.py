"""Any program: traced, compiled for any chip, measured."""

from llamem.memory.compiling import compile_report, matmul_flops
from llamem.memory.measured import Measurement, measure
from llamem.memory.report import Buffer, Collective, Comparison, GiB, Report, compare
from llamem.memory.residuals import Residuals, saved_residuals
from llamem.memory.targets import TARGETS, Target, available, target

__all__ = [
    "TARGETS",
    "Buffer",
    "Collective",
    "Comparison",
    "GiB",
    "Measurement",
    "Report",
    "Residuals",
    "Target",
    "available",
    "compare",
    "compile_report",
    "matmul_flops",
    "measure",
    "saved_residuals",
    "target",
]
