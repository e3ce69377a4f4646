"""Public names that are imported when they are asked for (PEP 562): an import runs what it needs and no more."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`, by the names that each of its modules gives.

    Type checkers and editors find the same names in the package's `if TYPE_CHECKING:` block.
    """
    module_of = {name: module for module, given in names.items() for name in given}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")  # such as llamem.losses, after `import llamem`
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(module_of), sorted(module_of)
