"""A real browser for tests: Chromium without a window, driven through its debugging pipe.

The mouse and the keyboard are the browser's own: an event goes to what lies at that place.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of a browser on this machine; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own. Requests that it makes for anything but files are kept."""

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._count = 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        own = [f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
        # The browser talks through its descriptors 3 and 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
        self._process = subprocess.Popen(
            [*shell, program, *FLAGS, *own, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        self._left = b""

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def ask(self, method: str, **values: Any) -> Any:
        """The answer of the browser to a command of its debugging protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._message()).get("id") != self._count:
            self._on_event(found)
        assert "error" not in found, found
        return found["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._left += more
        text, self._left = self._left.split(b"\0", 1)
        return json.loads(text)  # type: ignore[no-any-return]

    def _on_event(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))

    def open(self, file: Path) -> None:
        """Load a file, to its end."""
        self.ask("Page.navigate", url=file.resolve().as_uri())
        self.read("new Promise(end => document.readyState === 'complete' ? end() : onload = end)")

    def read(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Click with the mouse on the first element that a selector finds, at a place within it."""
        where = self.read(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        left, top, width, height = where
        at = {"x": left + across * width, "y": top + down * height}
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.ask("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        """Write what is seen of the page into a PNG."""
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))
