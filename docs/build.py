"""Builds the site of the course with Jupyter Book, and checks every link inside it: `make site`.

README, notebooks, glossary and contributors' page are the pages, and the API comes from the docstrings. All of them are
copied to build/site first, since Jupyter Book wants its pages in one folder.
"""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jaxmem
import llamem
from jaxmem.chips.names import chip_called
from llamem.llama.config import PRESETS
from llamem.planner.grid import MODELS, read

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PAGES = SITE / "_build" / "html"
FOLDERS = ("layers", "losses", "llama", "text", "train", "quantized", "host", "adapters", "files", "runs", "planner")


def api_page() -> str:
    """List the public names, the instrument's and then llamem's by folder; what `import llamem` gives is called so."""
    examples = [
        block
        for name in ("README.md", "docs/how_do_i.md")
        for block in re.findall(r"```py(?:thon)?\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    ]
    parts = [
        "# The packages",
        "The public names: those of `jaxmem`, the instrument, and those of `llamem` by folder. Those called "
        "`llamem.name` come with `import llamem`.",
        "## jaxmem",
        inspect.getdoc(jaxmem) or "",
    ]
    parts += [entry(jaxmem, name, examples) for name in sorted(jaxmem.__all__, key=str.lower)]
    for folder in FOLDERS:
        module = importlib.import_module(f"llamem.{folder}")
        parts += [f"## llamem.{folder}", inspect.getdoc(module) or ""]
        for name in sorted(module.__all__, key=lambda name: (name not in llamem.__all__, name.lower())):
            parts.append(entry(llamem if name in llamem.__all__ else module, name, examples))
    return "\n\n".join(parts) + "\n"


def entry(module: types.ModuleType, name: str, examples: Sequence[str]) -> str:
    """One name: how it is called, its docstring, which is Markdown as it stands, and the shortest example with it."""
    value = getattr(module, name)
    parts = [f"### {module.__name__}.{name}"]
    if callable(value):
        parts += [f"```python\n{name}{_signature(value)}\n```", inspect.getdoc(value) or ""]
    elif isinstance(value, Mapping):
        parts += ["One of " + ", ".join(f"`{key!r}`" for key in value) + "."]
    if inspect.isclass(value):
        for member, function in inspect.getmembers(value, inspect.isfunction):
            if member in vars(value) and not member.startswith("_") and function.__doc__:
                call = f"```python\n.{member}{_signature(function)}\n```"
                parts += [call, inspect.getdoc(function) or ""]
    if found := [block for block in examples if re.search(rf"\b{name}\(", block)]:
        parts += ["For example:", f"```python\n{min(found, key=len)}```"]
    return "\n\n".join(parts)


def _signature(value: Callable[..., Any]) -> str:
    try:
        # A flax module's own signature is its metaclass's.
        text = str(inspect.signature(value.__init__ if inspect.isclass(value) else value))
    except ValueError:  # what is made in C does not say
        return "(...)"
    text = re.sub(r"^\(self(, )?", "(", text).removesuffix(" -> None")
    short = re.sub(r"<(?:function|class|object|factory)[^>]*>", "...", text)
    return re.sub(
        r"\b(?:jaxtyping|jaxlib\.\w+|jax|jaxmem|llamem|typing|collections\.abc|flax|optax)(?:\.\w+)*\.(?=[A-Z])",
        "",
        short,
    )


def _slug(heading: re.Match[str]) -> str:
    """Return Jupyter's name of a heading as Jupyter Book spells it."""
    return re.sub(r"[^\w-]", "", heading[0].lower())


def copy_pages() -> None:
    """Everything that becomes a page, to build/site, with links that Jupyter Book follows."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", SITE / "notebooks", ignore=shutil.ignore_patterns(".*", "runs"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "docs/_config.yml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".md"):
            text = text.replace("(docs/", "(")
        (SITE / Path(name).name).write_text(text, encoding="utf-8")
    for page in (SITE / "notebooks").glob("*.ipynb"):
        text = page.read_text(encoding="utf-8").replace("(../docs/", "(../")
        page.write_text(re.sub(r"(?<=\]\(#)[^)]*(?=\))", _slug, text), encoding="utf-8")
    for page in (*(ROOT / "docs").glob("*.ipynb"), *(ROOT / "docs").glob("*.md")):
        shutil.copy(page, SITE / page.name)
        if page.suffix == ".md":  # notebooks lie beside it there
            text = page.read_text(encoding="utf-8").replace("```mermaid", "```{mermaid}").replace("(../", "(")
            (SITE / page.name).write_text(text, encoding="utf-8")
    (SITE / "api.md").write_text(api_page(), encoding="utf-8")
    chapters = [f"  - file: notebooks/{path.stem}" for path in sorted((SITE / "notebooks").glob("[0-9]*.ipynb"))]
    chapters += [f"  - file: {path.relative_to(SITE).with_suffix('')}" for path in SITE.glob("notebooks/*.md")]
    toc = ["format: jb-book", "root: README", "parts:", "- caption: Notebooks", "  chapters:", *chapters]
    toc += [
        "- caption: Teach with it",
        "  chapters:",
        "  - file: teach_with_it",
        "- caption: Your own model",
        "  chapters:",
        *(
            f"  - file: {name}"
            for name in ("how_do_i", "memory_in_ci", "flax_nnx", "flax_linen", "equinox", "any_pytree", "pytorch")
        ),
        "- caption: Packages",
        "  chapters:",
        *(f"  - file: {name}" for name in ("api", "CONTRIBUTING", "floors", "compilers", "tried", "CHANGELOG")),
    ]
    (SITE / "_toc.yml").write_text("\n".join(toc) + "\n", encoding="utf-8")


def fits_page(rows: Path = ROOT / "docs" / "can_i_train_it.jsonl") -> str:
    """Return the page of what fits where, with its rows inside: it needs no network."""
    found = list(read(rows))
    asked = {row["model"] for row in found}
    models = {name: PRESETS[name].max_seq_len for name in MODELS if name in asked}
    chips = {row["chip"]: chip_called(row["chip"]).capacity_bytes for row in found}
    table = {"chips": chips, "models": models, "rows": found}
    page = (ROOT / "docs" / "can_i_train_it.html").read_text(encoding="utf-8")
    before, _, after = page.partition('/*TABLE*/{"chips": {}, "models": {}, "rows": []}')
    return before + json.dumps(table).replace("</", "<\\/") + after


class Links(HTMLParser):
    """What a page points to, and the places in it that others can point to."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the addresses and names of one tag."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ("href", "src") and tag != "link":
                self.targets.append(value)


def broken_links() -> list[str]:
    """Links inside the site that lead to no file, or to no place in it. Links to other sites are not followed."""
    pages = {page: Links(page) for page in PAGES.rglob("*.html") if "_static" not in page.parts}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            file = file / "index.html" if file.is_dir() else file
            known = pages[file].anchors if file in pages else None
            if not file.exists() or (
                parts.fragment and known is not None and unquote(parts.fragment) not in known | {"top"}
            ):
                broken.append(f"{page.relative_to(PAGES)}: {target}")
    return sorted(set(broken))


def main() -> None:
    """Return copies, builds, checks; ends with 1 where a page is missing or a link is broken."""
    copy_pages()
    built = subprocess.run(
        [Path(sys.executable).parent / "jupyter-book", "build", SITE], capture_output=True, text=True
    )
    warnings = re.findall(r".*(?:WARNING|ERROR).*", built.stdout + built.stderr)
    print("\n".join(warnings))
    if built.returncode:
        sys.exit(built.stdout + built.stderr)
    (PAGES / "can_i_train_it.html").write_text(fits_page(), encoding="utf-8")
    if broken := broken_links():
        sys.exit("broken links:\n" + "\n".join(broken))
    print(f"{len(list(PAGES.rglob('*.html')))} pages in {PAGES.relative_to(ROOT)}, no broken link inside")


if __name__ == "__main__":
    main()
