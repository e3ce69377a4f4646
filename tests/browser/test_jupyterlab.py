"""The notebooks where they are read: JupyterLab, Notebook 7 and exported pages, in a real browser.

`make browser` runs it. It needs Debian's `chromium` and `pip install playwright`, and is skipped, with the reason,
where either is missing. Each notebook is opened with its stored outputs; with `--weekly` four are also run to the end.
Screenshots lie in build/browser for a human look.
"""

import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pages import PICTURES, check_pictures, served, touch_the_timeline

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
PATIENCE = 300_000  # milliseconds, for a machine that has other things to do
# Every cell in the page at once, not only those in sight; the reader's colours; no question about news.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "notebook-extension/panel": {"windowingMode": "none"},
    "apputils-extension/themes": {"adaptive-theme": True},
    "apputils-extension/notification": {"fetchNews": "false"},
}
DARK = "document.body.dataset.jpThemeLight === 'false'"
WHOLE = "notebook => document.querySelectorAll('.jp-Notebook .jp-Cell').length >= notebook"
# How many errors each cell holds, from the page's model: how a version of JupyterLab draws them does not matter.
ERRORS = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.model.cells;
  return Array.from({length: cells.length}, (_, i) => {
    const outputs = cells.get(i).outputs ?? {length: 0};
    return Array.from({length: outputs.length}, (_, j) => outputs.get(j).type).filter(t => t === 'error').length;
  });
}"""
WAITING = "[...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.innerText.includes('*'))"


def n_cells(path: Path) -> int:
    return len(json.loads(path.read_text(encoding="utf-8"))["cells"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module", params=["lab", "notebook"])
def jupyter(request, tmp_path_factory):
    """A server on a copy of the notebooks; its address and what one of its pages is called."""
    if request.param == "notebook" and importlib.util.find_spec("notebook") is None:
        pytest.skip("needs Notebook 7: pip install notebook")
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns(".*", "runs"))
    for name, value in SETTINGS.items():
        settings = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(value))
    port = free_port()
    module, place = {"lab": ("jupyterlab", "lab/tree"), "notebook": ("notebook", "notebooks")}[request.param]
    options = f"--no-browser --allow-root --port={port} --expose-app-in-browser"
    options += " --IdentityProvider.token= --ServerApp.password="
    command = [sys.executable, "-m", module, *options.split(), f"--ServerApp.root_dir={home}"]
    kernels = {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
    }
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, env=os.environ | kernels)
        try:
            _wait_for(port, server, home / "log")
            yield f"http://127.0.0.1:{port}/{place}/notebooks", request.param
        finally:
            server.terminate()
            server.wait(30)


def _wait_for(port: int, server: subprocess.Popen, log: Path) -> None:
    for _ in range(120):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/api")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if server.poll() is not None:
            break
        time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


def opened(browser, address: str, path: Path, scheme: str = "light"):
    """A page with the whole notebook in it, scrolled through once."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
    page.goto(f"{address}/{path.name}?reset", timeout=PATIENCE)
    page.wait_for_function(WHOLE, arg=n_cells(path), timeout=PATIENCE)
    page.wait_for_function("window.jupyterapp && true", timeout=PATIENCE)
    for cell in page.locator(".jp-Notebook .jp-Cell").all():
        cell.scroll_into_view_if_needed()
    return page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_a_notebook_opens_whole(browser, jupyter, path):
    address, place = jupyter
    page = opened(browser, address, path)
    drawn = page.locator(".jp-OutputArea img")
    (drawn if drawn.count() else page.locator(".jp-Cell")).first.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / f"{place}_{path.stem}.png")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(DARK, timeout=PATIENCE)
    page.screenshot(path=PICTURES / f"{place}_dark_{path.stem}.png")
    figures = sum("image/png" in o.get("data", {}) for o in _outputs(path))
    # JupyterLab shows no words for an output's picture, stored or not (jupyter/enhancement-proposals#120).
    assert check_pictures(page, ".jp-Notebook", words=False) >= figures
    assert sum(page.evaluate(ERRORS)) == _raised(path)
    assert page.locator(".jp-Notebook .katex-error, .jp-Notebook [data-mjx-error]").count() == 0
    page.close()


def _outputs(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def _raised(path: Path) -> int:
    return sum(output["output_type"] == "error" for output in _outputs(path))


@pytest.mark.weekly
@pytest.mark.parametrize("number", ["00", "01", "03", "04"])
def test_run_all_reaches_the_end(browser, jupyter, number):
    address, place = jupyter
    if place != "lab":
        pytest.skip("run once, in JupyterLab")
    path = next((path for path in NOTEBOOKS if path.stem.startswith(number)), None)
    if path is None:
        pytest.skip(f"there is no notebook {number}")
    page = opened(browser, address, path)
    # Not awaited: it ends with the last cell. The kernel is as fresh as the page, so nothing asks about a restart.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.ready")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    page.wait_for_function(WAITING, timeout=PATIENCE)
    page.wait_for_function(f"!({WAITING})", timeout=1_200_000)
    page.locator(".jp-OutputArea img").first.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / f"ran_{path.stem}.png")
    prompts = [text for text in page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts() if text.strip()]
    counts = [int(text.strip("[]: ")) for text in prompts]
    assert counts == list(range(1, len(counts) + 1))
    assert sum(page.evaluate(ERRORS)) == _raised(path)
    controls = _move_controls(page, path)
    if number == "00":
        assert controls == 1
        touch_the_timeline(page)
    page.screenshot(path=PICTURES / f"moved_{path.stem}.png")
    page.close()


# What a cell shows beside its controls, whose handles move in any case.
SHOWN = """cell => { const copy = cell.cloneNode(true);
  copy.querySelectorAll('.widget-slider, .widget-play, .widget-dropdown').forEach(control => control.remove());
  return copy.innerHTML; }"""


def _changes(page, cell, do: Callable[[], object], what: str) -> None:
    """After `do` the cell shows something else."""
    before = cell.evaluate(SHOWN)
    do()
    for _ in range(60):
        if cell.evaluate(SHOWN) != before:
            return
        page.wait_for_timeout(1000)
    pytest.fail(f"{what} changes nothing")


def _cell_of(control):
    return control.locator("xpath=ancestor::div[contains(@class, 'jp-Cell ')][1]")


def _move_controls(page, path: Path) -> int:
    """Each slider is moved by the keyboard and each list's choice by one; how many there are."""
    sliders = page.locator(".jp-Notebook .widget-slider [role=slider], .jp-Notebook .noUi-handle").all()
    for number, slider in enumerate(sliders):

        def move(slider=slider) -> None:
            slider.focus()
            for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight"):  # one less, from any end
                page.keyboard.press(key)

        _changes(page, _cell_of(slider), move, f"slider {number} of {path.name}")
    lists = page.locator(".jp-Notebook .widget-dropdown select").all()
    for number, choice in enumerate(lists):
        now, options = choice.evaluate("list => list.selectedIndex"), choice.locator("option").count()
        for index in ((now + 1) % options, now):
            choose = partial(choice.select_option, index=index)
            _changes(page, _cell_of(choice), choose, f"list {number} of {path.name}")
    return len(sliders) + len(lists)


@pytest.mark.weekly
def test_an_exercise_typed_in_wrong_and_right(browser, jupyter):
    """The first exercise of 01: untouched, with a misconception typed in, and with its folded solution."""
    address, place = jupyter
    if place != "lab":
        pytest.skip("typed in once, in JupyterLab")
    path = next(path for path in NOTEBOOKS if path.stem.startswith("01"))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    at = next(i for i, cell in enumerate(cells) if "exercise" in cell["metadata"].get("tags", []))
    stub, solution = "".join(cells[at]["source"]), "".join(cells[at + 1]["source"])
    right = solution.split("```python\n")[1].split("```")[0]
    wrong = right.replace("jax.checkpoint(layer)", "layer")
    page = opened(browser, address, path)
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.ready")
    run = """async ([text, at]) => {
      const panel = window.jupyterapp.shell.currentWidget;
      panel.content.activeCellIndex = at;
      panel.content.activeCell.model.sharedModel.setSource(text);
      await window.jupyterapp.commands.execute('notebook:run-cell');
    }"""
    for above in range(at):
        if cells[above]["cell_type"] == "code":
            page.evaluate(run, ["".join(cells[above]["source"]), above])
    check = stub.strip().splitlines()[-1]
    output = page.locator(".jp-Notebook .jp-Cell").nth(at).locator(".jp-OutputArea").first
    for name, code, errors, words in (
        ("untouched", stub.removesuffix(check), 0, "not tried yet"),
        ("wrong", wrong, 1, "What is the least that a layer must have to run again?"),
        ("right", right, 0, "correct. One array per layer"),
    ):
        page.evaluate(run, [f"{code}\n\n{check}", at])
        output.get_by_text(words).first.wait_for(timeout=PATIENCE)
        assert page.evaluate(ERRORS)[at] == errors
        output.scroll_into_view_if_needed()
        page.screenshot(path=PICTURES / f"exercise_{name}.png")
    page.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The notebooks as nbviewer shows them, served on this machine: the address."""
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(folder), *map(str, NOTEBOOKS)]
    subprocess.run(command, check=True, capture_output=True)
    with served(folder) as address:
        yield address


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_an_exported_page_is_whole(browser, exported, path):
    page = browser.new_page(viewport={"width": 1100, "height": 1000})
    page.goto(f"{exported}/{path.stem}.html", wait_until="domcontentloaded")
    assert check_pictures(page, "main") >= sum("image/png" in o.get("data", {}) for o in _outputs(path))
    page.screenshot(path=PICTURES / f"html_{path.stem}.png")
    page.close()
