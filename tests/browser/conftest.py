import shutil

import pytest
from pages import PICTURES

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium. Without it, or without playwright, the test is skipped with the reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'llamem[browser]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()
