"""The course's site in a real browser, where `make site` has built it: its pages, its search, its timeline."""

from pathlib import Path

import pytest
from pages import PICTURES, check_pictures, served, touch_the_timeline

SITE = Path(__file__).resolve().parents[2] / "build" / "site" / "_build" / "html"
PAGES = sorted(SITE.glob("notebooks/[0-9]*.html")) + [SITE / f"{name}.html" for name in ("README", "api")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="there is no site here: make site"),
]


@pytest.fixture(scope="module")
def site():
    with served(SITE) as address:
        yield address


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem[:6])
def test_a_page_is_whole_in_light_and_dark(browser, site, path):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{site}/{path.relative_to(SITE)}", wait_until="domcontentloaded")
        page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        drawn = page.locator(".cell_output img, article img[src*=headline]")
        if drawn.count():
            drawn.first.scroll_into_view_if_needed()
        page.screenshot(path=PICTURES / f"site_{scheme}_{path.stem}.png")
    assert len(colours) == 2
    pictures = check_pictures(page, "article")
    assert pictures or path.stem == "api"
    other = "11_scale_out" if path.stem.startswith("12") else "12_larger_than_the_chip"
    assert page.locator(f"nav a[href*='{other}']").count()  # the way to every notebook
    page.close()


def test_search_finds_what_stands_in_a_notebook(browser, site):
    page = browser.new_page()
    page.goto(f"{site}/search.html?q=rematerialised", wait_until="domcontentloaded")
    page.wait_for_function("document.querySelectorAll('#search-results li a').length > 3")
    found = page.locator("#search-results li a").all_inner_texts()
    assert any("Where does the memory" in title for title in found)
    page.close()


def test_the_timeline_in_notebook_00_answers(browser, site):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(f"{site}/notebooks/00_where_the_memory_goes.html", wait_until="domcontentloaded")
    touch_the_timeline(page)
    page.screenshot(path=PICTURES / "site_timeline.png")
    page.close()
