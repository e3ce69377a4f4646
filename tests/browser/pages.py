"""What the tests in a browser share: pages served on this machine, their pictures, a folder for screenshots."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[2] / "build" / "browser"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder are served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def touch_the_timeline(page) -> None:
    """Click on the weights in the page of memory against time that notebook 00 shows: they tell of themselves."""
    where = "iframe[title='Memory against time']"
    page.locator(where).scroll_into_view_if_needed()  # a browser lets pages in frames out of sight stand still
    frame = page.frame_locator(where)
    canvas = frame.locator("canvas").first
    before, box = frame.locator("#buffer").inner_text(), canvas.bounding_box()
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] - 40})  # just above the axis lie the weights
    assert "weights" in frame.locator("#buffer").inner_text() != before


def check_pictures(page, within: str, words: bool = True) -> int:
    """Every picture is there and, where `words`, has some for those who do not see it; how many there are."""
    pictures = page.evaluate(
        "w => [...document.querySelectorAll(`${w} img`)].map(i => [i.alt, i.naturalWidth, i.src.slice(0, 99)])", within
    )
    for alt, width, source in pictures:
        if source.startswith(("http://127", "data:", "blob:", "file:")):  # badges come from other sites
            assert width > 0 and (alt or not words), source
    return len(pictures)
