"""A headless Chromium, driven by the DevTools protocol over pipes: nothing but the browser is needed."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIMIT_S = 20.0
CONNECT = (
    "import os, sys; read, write, *command = sys.argv[1:]; "
    "os.dup2(int(read), 3); os.dup2(int(write), 4); os.execv(command[0], command)"
)
"""The browser reads commands at file descriptor 3 and answers at 4."""
KEYS = {"Tab": 9, "Enter": 13, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find_browser() -> str | None:
    """The program of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page; a context manager. errors: exceptions of the page's scripts, and what its console was told."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900) -> None:
        self._numbers, self.errors = itertools.count(1), []
        program = find_browser()
        assert program is not None
        (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write))  # away from 3 and 4

        flags = f"--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --window-size={width},{height}"
        pipes = f"--remote-debugging-pipe --user-data-dir={profile}"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CONNECT,
                str(read),
                str(write),
                program,
                *flags.split(),
                *pipes.split(),
                "about:blank",
            ],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._to, self._from, self._rest, self._session = to_browser, from_browser, b"", None
        page = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._from, 1 << 20)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def until(self, condition: str) -> None:
        """Waits for a JavaScript expression to be true."""
        until = time.monotonic() + LIMIT_S
        while not self.run(f"Boolean({condition})"):
            shown = self.run("document.body.innerText")[:2000] if time.monotonic() > until else None
            assert shown is None, f"not within {LIMIT_S:g} s: {condition}; errors: {self.errors}; the page: {shown}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A mouse click at the middle of an element."""
        self.until(f"document.querySelector({selector!r})")
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where to click an element, which is scrolled to: the middle of its first line."""
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getClientRects()[0];"
            f" return [b.x, b.y, b.width, b.height]; }})(document.querySelector({selector!r}))"
        )
        return box[0] + box[2] / 2, box[1] + box[3] / 2

    def mouse(self, kind: str, x: float, y: float) -> None:
        buttons = {"mouseReleased": 0}.get(kind, 1)
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)

    def press(self, key: str) -> None:
        """A key, by its name or as a character."""
        more = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {"text": key}
        if key == "Enter":
            more["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def choose(self, selector: str, value: str) -> None:
        """Set a field or a choice, and tell the page."""
        self.until(f"document.querySelector({selector!r})")
        self.run(
            f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({selector!r}))"
        )

    def picture(self, path: Path) -> None:
        """The visible page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
