"""The page of memory against time in a real browser: pointer, keyboard, both colour schemes, an empty console."""

import pytest
from timelines import handmade

from llamem_course import plots


@pytest.fixture(params=["light", "dark"])
def page(browser, request, tmp_path):
    """Two programs, shown as in a notebook: in a frame without rights of its own."""
    shown = plots.timeline_page({"plain": handmade(), "larger": handmade(residuals=7)})
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><body>{shown._repr_html_()}</body>")
    opened = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme=request.param)
    told: list[str] = []
    opened.on("console", lambda message: told.append(message.text))
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.on("request", lambda asked: None if asked.url.startswith(("file:", "about:")) else told.append(asked.url))
    opened.goto(notebook.as_uri())
    yield opened
    assert told == []
    opened.close()


def at(canvas, step: float, mib: float) -> dict[str, float]:
    """The place of a step and a height in MiB in a chart of ten steps whose highest point is 16 MiB."""
    box = canvas.bounding_box()
    width, height = box["width"] - 46 - 8, box["height"] - 34 - 22
    return {"x": 46 + width * step / 10, "y": 34 + height * (1 - mib / (1.06 * 16))}


def test_pointing_and_clicking_tell_of_a_buffer(page):
    frame = page.frame_locator("iframe")
    canvas = frame.locator("canvas").first
    canvas.hover(position=at(canvas, 3.5, 9))
    assert "logits: 5.00 MiB" in frame.locator("#tip").inner_text()
    assert "operation 3: 12.00 MiB in use" in frame.locator("#tip").inner_text()
    canvas.click(position=at(canvas, 3.5, 9))
    told = frame.locator("#buffer").inner_text()
    for words in (
        "logits",
        "5.00 MiB (5,242,880)",
        "operation 3 to 4",
        "the forward pass",
        "jvp()/<made>/logits",
        "model.py:12",
    ):
        assert words in told
    assert "plain, operation 3: 12.00 MiB in use" in frame.locator("#alive").inner_text()
    frame.locator("#alive button").nth(1).click()
    assert "weights" in frame.locator("#buffer").inner_text()


def test_the_keyboard_reaches_every_buffer(page):
    frame = page.frame_locator("iframe")
    canvas = frame.locator("canvas").nth(1)
    canvas.focus()
    page.keyboard.press("p")
    page.keyboard.press("ArrowRight")
    assert "larger, operation 4" in frame.locator("#alive").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert "7.00 MiB" in frame.locator("#buffer").inner_text()
    page.keyboard.press("Escape")
    assert "No buffer here" in frame.locator("#buffer").inner_text()


def test_zoom_shows_a_part_and_the_whole_again(page):
    frame = page.frame_locator("iframe")
    canvas = frame.locator("canvas").first
    before = canvas.screenshot()
    frame.get_by_role("button", name="plain: zoom in").click()
    assert canvas.screenshot() != before
    frame.get_by_role("button", name="plain: show the whole schedule").click()
    assert canvas.screenshot() == before


def test_dark_and_light_differ(browser, tmp_path):
    plots.timeline_page({"plain": handmade()}).write(tmp_path / "page.html")
    colours = set()
    for scheme in ("light", "dark"):
        opened = browser.new_page(color_scheme=scheme)
        opened.goto((tmp_path / "page.html").as_uri())
        colours.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
        opened.close()
    assert len(colours) == 2
