"""The project's own promises: one address, agreeing versions, modules on floors, a light import, a README that runs."""

import ast
import importlib
import itertools
import json
import os
import py_compile
import re
import subprocess
import sys
import tomllib

import floors
import pytest
import set_address
import yaml

ROOT = floors.ROOT
LOCK = (ROOT / "requirements" / "lock.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


GRAPH = floors.graph()


@pytest.mark.quick
@pytest.mark.parametrize("module", GRAPH)
def test_a_folder_imports_from_lower_floors_only(module):
    here = floors.room(module)
    assert here in floors.FLOOR_OF, f"{here} has no floor yet: give it one in tests/floors.py"
    others = {floors.room(other) for other in GRAPH[module]} - {here}
    wrong = {other for other in others if floors.FLOOR_OF[other] >= floors.FLOOR_OF[here]}
    assert not wrong, f"{module} imports {wrong}, which do not lie below {here}"
    doors = {"jaxmem"} if here != "jaxmem" else set()  # of the instrument its public names, as everybody does
    if here != "llamem_course":
        assert not GRAPH[module] & floors.DOORS - doors, f"{module} imports from a door: name the module behind it"


@pytest.mark.quick
def test_no_module_imports_itself_through_others():
    assert not floors.circle(GRAPH)


@pytest.mark.quick
@pytest.mark.parametrize("module", [module for module in GRAPH if floors.room(module) in floors.CORE])
def test_the_core_knows_no_power(module):
    known = {floors.room(other) for other in floors.closure(module, GRAPH)}
    assert known <= {"jaxmem", *floors.CORE}


def test_imports_and_circles_are_found_in_every_form():
    known = ["llamem.a", "llamem.a.b", "llamem.c", "llamem.d.e", "jaxmem"]
    inside = "def f():\n    from llamem.d.e import g\n"
    text = f"import llamem.a.b, jaxmem\nfrom llamem import c, Llama\n{inside}import llamemory"
    assert floors.imports(text, known) == {"llamem.a.b", "llamem.c", "llamem", "llamem.d.e", "jaxmem"}
    assert floors.imports("from llamem.a import b", known) == {"llamem.a.b"}
    assert floors.imports("import llamem") == floors.imports("from llamem import Llama") == {"llamem"}
    with pytest.raises(AssertionError, match="from its package"):
        floors.imports("from . import config")
    assert floors.circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert floors.circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_picture_of_the_floors_is_that_of_the_imports():
    page = (ROOT / "docs" / "floors.md").read_text()
    assert page == floors.with_picture(page), "docs/floors.md shows other imports: run `make floors`"


@pytest.mark.quick
def test_every_module_is_small_and_uses_public_jax():
    for path in floors.MODULES.values():
        text = path.read_text()
        assert len(text.splitlines()) <= 500, f"{path.name} has more than 500 lines"
        assert "jax._src" not in text, f"{path.name} uses jax._src"


def test_no_module_bears_the_name_of_what_it_holds():
    for module, path in floors.MODULES.items():
        own = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert module.split(".")[-1] not in own, f"{module} holds a function of its own name: import finds either"


def test_importing_the_package_brings_nothing_else_along():
    code = """
import sys
import flax.nnx, jax, jaxtyping, numpy, optax
from jaxtyping import Array, Float
before = set(sys.modules)
import llamem
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The second is part of jaxtyping, the rest are parts of what was imported already.
    assert set(result.stdout.split()) <= {
        "jaxmem",
        "llamem",
        "wadler_lindig",
        "flax",
        "jax",
        "jaxlib",
        "jaxtyping",
        "optax",
    }


def test_the_instrument_brings_jax_and_numpy_alone():
    code = "import sys, jaxmem\njaxmem.compile_report(lambda x: x, 1.0, chip='local')\nprint('flax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.quick
def test_public_names_are_found_when_they_are_asked_for_and_load_what_they_need():
    code = """
import sys
import llamem.layers.stack
loaded = {name for name in sys.modules if name.split(".")[0] in ("llamem", "jaxmem")}
assert len(loaded) < 30 and not loaded & {"llamem.llama", "llamem.losses", "jaxmem.compiling"}, loaded
import importlib, jaxmem, llamem
assert llamem.losses.choose_tiles and llamem.runs.train and llamem.text.Tokenizer  # folders, too, without an import
for package in ("jaxmem", "llamem", *(f"llamem.{name}" for name in sys.argv[1:])):
    door = importlib.import_module(package)
    assert door.__all__ and all(getattr(door, name) is not None for name in door.__all__), package
    assert set(door.__all__) <= set(dir(door)) and not hasattr(door, "nothing_of_the_kind")
"""
    folders = sorted(door.removeprefix("llamem.") for door in floors.DOORS if door.startswith("llamem."))
    shown = [name for name in folders if "__all__" in floors.MODULES[f"llamem.{name}"].read_text()]
    result = subprocess.run([sys.executable, "-c", code, *shown], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.quick
@pytest.mark.parametrize("package", ["jaxmem", "llamem"])
def test_the_table_of_public_names_is_what_type_checkers_see(package):
    (block,) = (node for node in ast.parse(floors.MODULES[package].read_text()).body if isinstance(node, ast.If))
    imported = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {node.module: tuple(name.name for name in node.names) for node in imported}
    assert seen == vars(importlib.import_module(package))["_NAMES"]


@pytest.mark.quick
def test_packages_are_imported_where_their_sources_are_not(tmp_path):
    """As in an application that is frozen: the compiled files alone."""
    for package in ("jaxmem", "llamem"):
        for path in [path for path in floors.MODULES.values() if path.is_relative_to(floors.SOURCE / package)]:
            compiled = tmp_path / path.relative_to(floors.SOURCE).with_suffix(".pyc")
            py_compile.compile(str(path), str(compiled), doraise=True)
    code = "import jaxmem, llamem; print(jaxmem.GiB, llamem.apply_stack.__name__, jaxmem.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "apply_stack" in run.stdout and str(tmp_path) in run.stdout


def test_conda_and_binder_install_the_locked_versions():
    (python, _, pip) = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    constraint, package = pip["pip"]
    assert constraint == "--constraint requirements/lock.txt"
    extras = re.fullmatch(r"--editable \.\[(.*)\]", package)
    assert extras and set(extras[1].split(",")) == {"lab", "notebooks", "train"}
    binder_constraint, binder_package = (ROOT / "binder" / "requirements.txt").read_text().split("\n")[:2]
    assert binder_constraint == "--constraint ../requirements/lock.txt"
    binder_extras = re.fullmatch(r"\.\[(.*)\]", binder_package)
    assert binder_extras and set(binder_extras[1].split(",")) <= set(extras[1].split(","))
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    # Binder and conda run the same Python, one that the package and the lock allow.
    assert (ROOT / "binder" / "runtime.txt").read_text().strip() == python.replace("=", "-")
    assert PROJECT["requires-python"] == ">=3.11" and python >= "python=3.11"


def test_the_lock_holds_every_direct_dependency_and_satisfies_it():
    pytest.importorskip("packaging")
    from packaging.requirements import Requirement

    pins: dict[str, list[str]] = {}
    for line in LOCK.splitlines():
        if pin := re.match(r"([\w.-]+)==([^\s;]+)", line):
            pins.setdefault(pin[1].lower(), []).append(pin[2])
    wanted = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, wanted):
        assert requirement.name in pins, f"{requirement.name} is not locked: run `make lock`"
        assert all(map(requirement.specifier.contains, pins[requirement.name])), requirement
    assert pins["jax"] == pins["jaxlib"]


def test_the_address_is_the_same_everywhere():
    slug, tag = set_address.address(ROOT)
    for path in [path for pattern in set_address.FILES for path in ROOT.glob(pattern)]:
        text = path.read_text(encoding="utf-8")
        assert text == set_address.rewrite(text, slug, tag), f"{path.name} names another address: run `make address`"
    assert slug in README and slug in (ROOT / "CITATION.cff").read_text()


def test_the_citation_names_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_the_readmes_path_leads_to_every_notebook_once():
    listed = re.findall(r"\*\*(\d\d)\*\* \[[^]]*\]\(notebooks/([^)]+)\) \[▶\]\(\S+/notebooks/([^)]+)\)", README)
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(name for _, name, _ in listed) == names, "the README's path and notebooks/ differ"
    assert all(name.startswith(number) and name == in_colab for number, name, in_colab in listed)


def minutes(notebook):
    """The minutes that a notebook's sections say they take, and those of its exercises among them."""
    (path,) = (ROOT / "notebooks").glob(f"{notebook}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    said = {title: int(number) for title, number in re.findall(r"^## (.+)\n+\*(\d+) minutes?\.\*", text, re.MULTILINE)}
    return sum(said.values()), said["Exercises"]


@pytest.mark.quick
def test_a_teacher_is_told_the_minutes_that_the_notebooks_say():
    page = (ROOT / "docs" / "teach_with_it.md").read_text()
    rows = {number: int(told) for number, told in re.findall(r"^\| \[(\d\d) [^|]*\| (\d+) \|", page, re.MULTILINE)}
    assert list(rows) == ["00", "01", "04", "03", "06", "07"]
    for number, told in rows.items():
        said, _ = minutes(number)
        assert abs(told - said) <= 10, f"{number}: the page says {told}, its sections {said}"
    day = ("00", "01", "04")
    (told,) = re.findall(r"Three notebooks: (\d+) minutes with the exercises, (\d+) without", page)
    exercises = sum(minutes(number)[1] for number in day)
    together = sum(rows[number] for number in day)
    assert int(told[0]) == together and abs(int(told[1]) - (together - exercises)) <= 15
    assert "45 minutes a notebook" in README
    listed = sorted(path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert all(30 <= minutes(number)[0] <= 140 for number in listed)


def test_what_the_prose_links_to_is_there():
    pages = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
    for name in pages:
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", (ROOT / name).read_text()):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name} links to {link}, which is not there"


def test_the_make_targets_that_the_prose_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for name in ("README.md", "CONTRIBUTING.md", "docs/teach_with_it.md", "docs/tried.md"):
        for target in re.findall(r"\bmake ([a-z]+)\b", (ROOT / name).read_text()):
            assert re.search(rf"(?m)^{target}:", makefile), f"{name} names `make {target}`, which is not there"


SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run_as_a_reader(code, folder):
    """Run `code` in a process of its own, without the flags by which tests compile faster, and programs run slower."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
def test_the_short_answers_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how_do_i.md").read_text(), flags=re.DOTALL)
    run = run_as_a_reader("\n".join(blocks), tmp_path)
    assert not run.returncode and "{'remat': None, 'batch': 256}" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_the_short_answer_on_keras_runs(tmp_path):
    pytest.importorskip("keras", minversion="3")  # in no extra: `pip install keras`
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "how_do_i.md").read_text(), flags=re.DOTALL)
    run = run_as_a_reader(block, tmp_path)
    assert run.stdout.split() == ["True", "None", "7.27", "GiB", "nothing", "1.56", "GiB"], run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_readmes_python_runs(snippet, tmp_path):
    result = run_as_a_reader(snippet, tmp_path)
    assert result.returncode == 0, result.stderr
    promised = re.findall(r"# prints (.*)", snippet)
    assert all(text in result.stdout for text in promised), result.stdout


def test_no_file_names_a_place_on_somebodys_machine():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.~:/])/(root|home|work|Users)/[\w.]")
    for name in filter(None, listing.stdout.splitlines()):
        path = ROOT / name
        if path.is_file() and path.name not in {"test_notebooks_static.py", "test_project.py"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not pattern.search(text), f"{name} names {pattern.search(text)}"
