"""What a TPU's compiler expects an operation to take: its own estimate in cycles, read from the code that it made.

Only a compiler that went to the end says so (`*after_codegen.txt`), and only one for TPUs: XLA's for GPUs writes none.
"""

import dataclasses
import math
import re
from collections import Counter
from typing import Any

from jaxmem.reading.hlo import ENTRY, Program

# Operations that take no time of their own, or whose time is that of what they wait for or call.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("copy-start", "copy-done", "after-all", "partition-id", "replica-id", "opt-barrier"),
}
_SMALL = 4096  # numbers: what is smaller than that, without an estimate, is not worth a word


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one operation takes in all, by the compiler's estimate: its path, its line, how often it runs, seconds."""

    operation: str
    source: str
    times: int
    seconds: float


def estimated_cycles(generated: Program, assigned: Program) -> dict[str, Any] | None:
    """Return the cycles of a program, for JSON: `costs`, rows of an operation, its line, how often it runs and its
    cycles in all; `step`, cycles in all by the instruction's name; `untimed`, how often what has no estimate runs.

    `generated`: the program after its code was made; `assigned`: the same after memory was assigned, whose loops still
    say how often they run. None where a loop of neither does, or where there is no estimate at all.
    """
    times = generated.executions or assigned.executions
    if times is None:
        return None
    lines = [line for instructions in generated.computations.values() for line in instructions]
    inside = {name for line in lines for name in (line.named("calls"), line.named("to_apply")) if name}
    step: dict[str, int] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    untimed: Counter[str] = Counter()
    for computation, instructions in generated.computations.items():
        runs = times.get(computation, 0) if computation not in inside or computation == ENTRY else 0
        for line in instructions if runs else ():
            said = re.search(r'"estimated_cycles":"(\d+)"', line.rest)
            operation = line.operation or line.opcode
            if said:
                step[line.name] = runs * int(said[1])
                row = rows.setdefault((operation, generated.source(line) or assigned.source(line)), [0, 0])
                row[0] += runs
                row[1] += step[line.name]
            elif line.opcode not in _FREE and any(math.prod(shape.sizes) > _SMALL for shape in line.shapes):
                untimed[operation] += runs
    if not step:
        return None
    costs = [
        {"operation": operation, "source": source, "times": times, "cycles": cycles}
        for (operation, source), (times, cycles) in rows.items()
    ]
    return {"costs": costs, "step": step, "untimed": dict(untimed)}
