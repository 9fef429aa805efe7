"""The pictures of viewing.md, taken of the page in Chromium: python docs/view_pictures.py RUN [RUN...]"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser  # noqa: E402
from view_process import ViewProcess  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLOURS = 128
"""Of a picture, so that it is small."""
SETTLED_S = 0.3
"""For what is drawn after the last element is there."""


def main(runs: list[str]) -> None:
    """Curves of all runs; groups, a group and a completion of the first."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        ViewProcess(*runs) as view,
        Browser(Path(profile), width=1200, height=860) as browser,
    ):

        def take(name: str, there: str) -> None:
            browser.until(f"document.querySelector({there!r})")
            browser.until("![...document.querySelectorAll('p.bar')].some(bar => bar.textContent.includes('…'))")
            time.sleep(SETTLED_S)
            path = IMAGES / f"view-{name}.png"
            browser.picture(path)
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)

        browser.open(view.url + "#smooth=0.6")
        take("curves", "figure")
        browser.open(view.url + "#view=groups&first_step=60&finish_reason=stop")
        take("groups", "tbody tr")
        browser.click("tbody a")
        browser.click("#compare button")
        take("group", "#difference")
        browser.click(".side a")
        browser.until("document.querySelector('#tokens')")
        browser.run("document.querySelector('#tokens').focus()")
        for _ in range(12):
            browser.press("ArrowRight")
        take("tokens", "#tokens .chosen")


if __name__ == "__main__":
    main(sys.argv[1:])
