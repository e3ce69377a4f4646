"""`%load_ext jaxmem.magic`, then `%%peak v5e-1 l4` above a cell whose last line calls a step: what would it need?"""

import ast
from typing import Any

from jaxmem.compiling import compile_report
from jaxmem.report import Comparison, compare


def load_ipython_extension(ipython: Any) -> None:
    """Register `%%peak CHIP ...`: the cell runs but for its last line, a call, which is compiled for each chip."""

    def peak(line: str, cell: str) -> Comparison:
        tree = ast.parse(cell)
        last = tree.body.pop() if tree.body else None
        if not isinstance(last, ast.Expr) or not isinstance(call := last.value, ast.Call) or call.keywords:
            raise ValueError("%%peak asks about the call in the cell's last line: step(state, batch).")
        names = ipython.user_ns
        exec(compile(tree, "<peak>", "exec"), names)
        step, *arguments = (
            eval(compile(ast.Expression(node), "<peak>", "eval"), names) for node in (call.func, *call.args)
        )
        return compare({chip: compile_report(step, *arguments, chip=chip) for chip in line.split() or ["local"]})

    ipython.register_magic_function(peak, "cell", "peak")
