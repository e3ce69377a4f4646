"""Public names that are imported when they are asked for (PEP 562): an import runs what it needs and no more."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`: the names that its `if TYPE_CHECKING:` block imports.

    There type checkers and editors find them, written once, as in any other module.
    """
    blocks = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: node.module for node in imports for alias in node.names if node.module}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")  # such as llamem.losses, after `import llamem`
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(module_of), sorted(module_of)
