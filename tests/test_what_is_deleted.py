"""Nothing is deleted, renamed or replaced but what this program made: every place that does, and why it may."""

import ast
import json
import re
from collections.abc import Iterator

import floors
import pytest

# Wherever these stand, called or handed on, they are a file's; those of the second row are so only when called so.
OF_FILES = frozenset(("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames"))
CALLED = {"os": frozenset(("remove", "replace")), "shutil": frozenset(("move",))}
NETNS = r"""trap 'ip netns del "$a"; ip netns del "$b"; rm -rf "/etc/netns/$a" "/etc/netns/$b"' EXIT"""
IN_SHELLS = re.compile(r"(?:^|[\s;&|'\"(])(?:rm|rmdir|mv|unlink|shred|truncate)\s|\s-delete\b")


def places(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the function in which each such name stands."""
    for node in ast.iter_child_nodes(tree):
        here = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            here = f"{inside}.{node.name}".lstrip(".")
        if is_one(node):
            yield inside
        yield from places(node, here)


def is_one(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in OF_FILES | CALLED.get(node.module or "", frozenset()) for alias in node.names)
    if isinstance(node, ast.Attribute):
        of_module = CALLED.get(node.value.id, ()) if isinstance(node.value, ast.Name) else ()
        return node.attr in OF_FILES or node.attr in of_module
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # `path.replace(other)`; a string's has two arguments, and a configuration's has names.
        return node.func.attr in ("replace", "delete") and len(node.args) == 1 and not node.keywords
    return False


def found() -> set[tuple[str, str]]:
    """Return the file and the function of every place in `src`, `scale` and `tests`."""
    files = sorted(path for folder in ("src", "scale", "tests") for path in (floors.ROOT / folder).rglob("*"))
    everywhere = set()
    for path in files:
        name = str(path.relative_to(floors.ROOT))
        if path.suffix == ".py" and path.name != "test_what_is_deleted.py":
            everywhere |= {(name, function) for function in places(ast.parse(path.read_text(encoding="utf-8")))}
        elif path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
            everywhere |= {(name, function) for function in places(ast.parse(code))}
        elif path.suffix in (".sh", ".yaml"):
            everywhere |= {(name, line.strip()) for line in path.read_text().splitlines() if IN_SHELLS.search(line)}
    return everywhere


TMP = "in pytest's own folder for this test"
MAY = {
    ("src/jaxmem/answers.py", "_keep_small"): "reports that bear the mark of this package",
    ("src/jaxmem/answers.py", "clear_reports"): "the same",
    ("src/jaxmem/chips/compiler_process.py", "end_with_parent"): "the folder that its parent made for this one answer",
    ("src/jaxmem/chips/compiler_process.py", "write_answer"): "in that folder, from an unfinished name",
    ("src/jaxmem/chips/compilers.py", "_install"): "in a folder that `whole_folder` made a moment ago",
    ("src/jaxmem/chips/compilers.py", "_remove_marked"): "what bears the mark of what was fetched",
    ("src/jaxmem/chips/compilers.py", "remove_compilers"): "the lock beside what bore the mark, and an empty folder",
    ("src/jaxmem/common/files.py", "locked"): "the file beside the lock that names the holder, who wrote it",
    ("src/jaxmem/common/files.py", "whole_folder"): "the name that it drew; an empty folder is replaced, no other",
    ("src/jaxmem/common/files.py", "write_whole"): "the name that it drew; its callers write files of their own names",
    ("src/llamem/llama/weights.py", "with_numbers"): "no file: a weight with other numbers",
    ("src/llamem/train/snapshots.py", "Snapshots._set_aside"): "a snapshot of ours, to a name that is free",
    ("tests/adapters.py", "expected_gradients"): "no file: adapters with other numbers",
    ("tests/colab_versions.sh", 'rm -rf "$folder"'): "an environment under build/, of its own name",
    ("tests/colab_versions.sh", 'rm -rf "$folder/notebooks"'): "a copy in that environment",
    ("tests/files/make_golden.py", ""): "in the folder of a golden model, which it has just written",
    ("tests/files/test_pretrained.py", "rewrite"): TMP,
    ("tests/files/test_pretrained.py", "test_a_model_is_saved_with_the_tokens_that_end_its_texts"): TMP,
    ("tests/files/test_pretrained.py", "test_damaged_folders"): TMP,
    ("tests/jaxmem/test_compilers.py", "test_a_part_appears_whole_or_not_at_all"): TMP,
    ("tests/jaxmem/test_compilers.py", "test_bad_input_is_refused_before_anything_is_fetched"): TMP,
    ("tests/jaxmem/test_timeline.py", "test_damaged_files_are_told_and_crash_nothing"): TMP,
    ("tests/run_notebooks.py", "run"): "the notebook that it ran, from an unfinished name beside it",
    ("tests/train/hosts_in_namespaces.sh", NETNS): "of namespaces that it made, which bear its process's number",
    ("tests/train/test_chats.py", "test_adapters_train_on_chats_over_given_weights_and_go_on_bit_by_bit"): TMP,
    ("tests/train/test_data.py", "test_equal_documents_are_all_trained_or_all_held_out"): TMP,
    ("tests/train/test_loop.py", "test_rows_whose_snapshots_were_deleted_are_kept_beside"): TMP,
    ("tests/train/test_snapshots.py", "test_a_snapshot_under_another_step_s_name_is_noticed"): TMP,
}


@pytest.mark.quick
def test_only_what_this_program_made_is_deleted_renamed_or_replaced():
    here = found()
    assert not here - MAY.keys(), "say in MAY why what these touch is this program's own, or leave it alone"
    assert not MAY.keys() - here, "these are gone: take them out of MAY"


def test_every_form_of_deleting_is_found():
    forms = """
shutil.rmtree(a)
from shutil import rmtree
from os import remove as away
atexit.register(path.unlink)
os.remove(a)
os.replace(a, b)
path.replace(b)
shutil.move(a, b)
manager.delete(3)
"""
    innocent = ["words.replace('a', 'b')", "config.replace(**changes)", "rows.remove(a)", "np.delete(a, [7])"]
    for line in forms.split("\n")[1:-1]:
        assert list(places(ast.parse(f"class A:\n  def f():\n    {line}"))) == ["A.f"], line
    assert not list(places(ast.parse("\n".join(innocent))))
    for line in ("rm -rf x", "cd a && mv b c", "trap 'rm x' EXIT", "find . -delete", "  rmdir x"):
        assert IN_SHELLS.search(line), line
    assert not IN_SHELLS.search("the form is -deleted, warm ") and not IN_SHELLS.search("echo firm -f")
