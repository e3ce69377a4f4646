"""The folders of the package, who may import whom, and the picture of who does: `make floors` draws it anew.

The picture is a diagram in docs/floors.md, between two marks, made from the imports themselves.
"""

import ast
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("jaxmem", "llamem", "llamem_course")
# Bottom first. A folder imports from lower floors only, never from one beside it; a new folder takes its place here.
FLOORS = (
    {"jaxmem": "the instrument: any program, traced, compiled for any chip, proved"},
    {"llamem.layers": "anyone's layers in less memory"},
    {"llamem.losses": "cross-entropy without the logits", "llamem.llama": "the plain Llama"},
    {"llamem.text": "text to tokens and back"},
    {"llamem.train": "the plain step, data, snapshots"},
    {"llamem.quantized": "frozen matrices in few bits"},
    {"llamem.mesh": "a device's part of a step", "llamem.host": "what waits in the host's memory"},
    {"llamem.adapters": "low-rank adapters, many at once"},
    {"llamem.files": "open models in and out"},
    {"llamem.runs": "one run, as a plan says"},
    {"llamem.planner": "before a run: what will it cost, what is best"},
    {"llamem": "the package's own door, and its command"},
    {"llamem_course": "what only notebooks use"},
)
CORE = ("llamem.layers", "llamem.losses", "llamem.llama", "llamem.text", "llamem.train")
FLOOR_OF = {room: i for i, floor in enumerate(FLOORS) for room in floor}
START, END = "<!-- floors: drawn by `make floors` -->", "<!-- end of floors -->"


def module_name(path: Path) -> str:
    """`llamem.layers.stack` for src/llamem/layers/stack.py; `llamem.layers` for its `__init__`, the folder's door."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))}
# Doors are a folder's public names. They stand on its floor, and no module goes through them.
DOORS = {module for module, path in MODULES.items() if path.name == "__init__.py"}


def room(module: str) -> str:
    """The folder of a module of llamem, the whole package of the others."""
    folder = ".".join(module.split(".")[:2])
    return folder if folder in DOORS and folder.startswith("llamem.") else module.split(".")[0]


def imports(text: str, modules: Collection[str] = MODULES) -> set[str]:
    """Modules of the three packages that a source text imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write a relative import as one from its package"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in inner]
        else:
            continue
        found |= {name for name in names if name.split(".")[0] in PACKAGES}
    return found


def graph() -> dict[str, set[str]]:
    """Every module, doors among them, and what it imports of the three packages."""
    return {module: imports(path.read_text()) for module, path in MODULES.items()}


def closure(module: str, edges: dict[str, set[str]]) -> set[str]:
    """A module and all that it imports, directly or not, without doors."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        one = todo.pop()
        if one not in seen and one not in DOORS:
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
    arrows = {(room(module), room(other)) for module, others in graph().items() for other in others - DOORS}
    rooms = {room(module) for module in MODULES}
    lines = ["```mermaid", "flowchart TD"]
    for i, floor in reversed(list(enumerate(FLOORS))):
        names = [name for name in floor if name in rooms]
        if names:
            lines.append(f"  subgraph floor{i}[ ]")
            lines += [f'    {name}["<b>{name}</b><br>{floor[name]}"]' for name in names]
            lines.append("  end")
    lines += [f"  {a} --> {b}" for a, b in sorted(arrows) if a != b]
    return "\n".join([*lines, "```"])


def with_picture(text: str) -> str:
    """A page with the picture between its marks drawn anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert rest and after, f"docs/floors.md lacks {START} ... {END}"
    return f"{before}{START}\n\n{picture()}\n\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "docs" / "floors.md"
    page.write_text(with_picture(page.read_text()))
