"""Where the tests' CPU time goes, by folder and kind: `python -m pytest --cpu`; CONTRIBUTING.md holds what it printed.

Tracing and compiling here are as long as JAX itself says, so the machine should be idle. Other processes are those that
a test waited for: compilers of absent chips, kernels of notebooks, hosts of a run.
"""

import os
from collections import defaultdict
from pathlib import Path

import jax
import pytest

KINDS = ("importing", "tracing", "compiling here", "other processes", "the rest")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",
    "/jax/core/compile/backend_compile_duration": "compiling here",
}


class CpuTable:
    """A plugin of pytest: each report carries its seconds, also from a worker, and the table is printed at the end."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.before = 0.0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in EVENTS:
            self.spent[EVENTS[event]] += duration_secs

    def since(self) -> tuple[float, float]:
        """CPU seconds of this process, and of those that it waited for, since the last question."""
        now = os.times()
        here, elsewhere = now.user + now.system, now.children_user + now.children_system
        took = here - self.before[0], elsewhere - self.before[1]
        self.before = here, elsewhere
        return took

    def pytest_collection_finish(self) -> None:
        importing = sum(self.since())
        self.spent.clear()
        self.spent["importing"] = importing

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        here, elsewhere = self.since()
        known = self.spent["tracing"] + self.spent["compiling here"]
        kinds = dict(self.spent) | {"other processes": elsewhere, "the rest": max(0.0, here - known)}
        report.user_properties.append(("cpu", kinds))
        self.spent.clear()
        return report

    def pytest_terminal_summary(self, terminalreporter) -> None:
        table: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
        for report in (report for reports in terminalreporter.stats.values() for report in reports):
            for name, spent in getattr(report, "user_properties", ()):
                if name == "cpu":
                    for kind, seconds in spent.items():
                        table[str(Path(report.nodeid.split("::")[0]).parent)][kind] += seconds
                        table["all"][kind] += seconds
        terminalreporter.write_line(f"\n| CPU seconds | {' | '.join(KINDS)} | all |\n|---|{'---|' * (len(KINDS) + 1)}")
        for folder, spent in sorted(table.items(), key=lambda row: -sum(row[1].values())):
            cells = [*spent.values(), sum(spent.values())]
            terminalreporter.write_line(f"| {folder} | {' | '.join(f'{seconds:.0f}' for seconds in cells)} |")
