"""The folders of the package, who may import whom, and the picture of who does: `make floors` draws it anew.

The picture is a diagram in CONTRIBUTING.md, between two marks, made from the imports themselves.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "llamem"
# Bottom first. A folder imports from lower floors only, never from one beside it; a new folder takes its place here.
FLOORS = (
    {
        "_startup": "no noise on import",
        "_extras": "optional packages",
        "_files": "caches, files that appear whole",
        "_checks": "checks of arguments",
    },
    {"memory": "any program: traced, compiled for any chip"},
    {"layers": "anyone's layers in less memory", "verify": "proofs, for anyone's loss"},
    {"losses": "cross-entropy without the logits", "llama": "the plain Llama"},
    {"train": "the plain step, data, snapshots"},
    {"quantized": "frozen matrices in few bits"},
    {"mesh": "a device's part of a step", "host": "what waits in the host's memory"},
    {"places": "which of them a plan asks for"},
    {"adapters": "low-rank adapters, many at once"},
    {"files": "open models in and out"},
    {"runs": "one run, as a plan says"},
    {"planner": "before a run: what will it cost, what is best"},
    {"course": "what only notebooks use"},
    {"llamem": "the public names"},
    {"__main__": "the command"},
)
# Modules that stand on a higher floor than the other ones of their folder, the folders' surfaces among them.
ABOVE = {
    **dict.fromkeys(("llama", "llama.pretrained", "llama.gguf_weights", "llama.weights_in"), "files"),
    **dict.fromkeys(("train", "train.planned", "train.tasks", "train.loop", "train.run"), "runs"),
}
FLOOR_OF = {room: i for i, floor in enumerate(FLOORS) for room in floor}
START, END = "<!-- floors: drawn by `make floors` -->", "<!-- end of floors -->"


def module_name(path: Path) -> str:
    """`layers.stack` for src/llamem/layers/stack.py; `layers` for its `__init__`; "" for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """The folder of a module, or the module's own name beside the folders; `llamem` for the public names."""
    return ABOVE.get(module) or module.split(".")[0] or "llamem"


def imports(text: str, modules: dict[str, Path] = MODULES) -> set[str]:
    """Modules of the package that a source text imports, wherever in it, by their names without `llamem.`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write a relative import as one from llamem"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("llamem.") in modules else base for name in inner]
        else:
            continue
        found |= {name.removeprefix("llamem").removeprefix(".") for name in names if re.match(r"llamem(\.|$)", name)}
    return found


def graph() -> dict[str, set[str]]:
    """Every module of the package, and what it imports of it."""
    return {module: imports(path.read_text()) for module, path in MODULES.items()}


def closure(module: str, edges: dict[str, set[str]]) -> set[str]:
    """A module and all that it imports, directly or not, without folders' surfaces."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        one = todo.pop()
        if one not in seen and (one == module or MODULES[one].name != "__init__.py"):
            seen.add(one)
            todo += edges[one]
    return seen


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, in order; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module not in done:
            for other in sorted(edges.get(module, ())):
                if found := visit(other, [*way, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in edges if (found := visit(module, []))), [])


def picture() -> str:
    """The folders and their imports as a Mermaid diagram, which GitHub draws; the ground floor last."""
    arrows = {(room(module), room(other)) for module, others in graph().items() for other in others}
    rooms = {room(module) for module in MODULES} - {"llamem"}
    lines = ["```mermaid", "flowchart TD"]
    for i, floor in reversed(list(enumerate(FLOORS))):
        names = [name for name in floor if name in rooms]
        if names:
            lines.append(f"  subgraph floor{i}[ ]")
            lines += [f'    {name}["<b>{name}</b><br>{floor[name]}"]' for name in names]
            lines.append("  end")
    lines += [f"  {a} --> {b}" for a, b in sorted(arrows) if a != b and "llamem" not in (a, b)]
    return "\n".join([*lines, "```"])


def with_picture(text: str) -> str:
    """A page with the picture between its marks drawn anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert rest and after, f"CONTRIBUTING.md lacks {START} ... {END}"
    return f"{before}{START}\n\n{picture()}\n\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(with_picture(page.read_text()))
