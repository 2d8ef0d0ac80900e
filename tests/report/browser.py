"""A headless chromium driven over the DevTools pipe: no other program, no port, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WHY_NOT = "no chromium found: the report is not looked at in a browser (apt-get install chromium)"
# Nothing of the browser itself may look like a request of the page.
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage", "--mute-audio",
    "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """The path of a chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `events` holds every DevTools event since it was opened."""

    def __init__(self, width: int = 1366, height: int = 768) -> None:
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()

        def pipes() -> None:
            # The browser reads descriptor 3 and writes descriptor 4; duplicates first, since they may be taken.
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        program = chromium()
        assert program is not None
        self.process = subprocess.Popen(
            [program, *QUIET, f"--user-data-dir={self.folder}", "about:blank"], preexec_fn=pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.number, self.rest, self.session = 0, b"", None
        self.answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, timeout_s: float = 60.0, **params: Any) -> dict[str, Any]:
        """One DevTools command and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout_s
        while self.number not in self.answers:
            self._read(end, method)
        answer = self.answers.pop(self.number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self, end: float, waiting_for: str) -> None:
        if not select.select([self.from_browser], [], [], max(end - time.monotonic(), 0.0))[0]:
            raise TimeoutError(f"chromium did not answer {waiting_for}")
        block = os.read(self.from_browser, 1 << 20)
        if not block:
            raise RuntimeError("chromium ended")
        *messages, self.rest = (self.rest + block).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self.answers[message["id"]] = message
            else:
                self.events.append(message)

    def open(self, path: Path) -> None:
        """Opens a report from disk and waits until it has drawn itself."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_until_drawn()

    def reload_by(self, statement: str) -> None:
        """Runs JavaScript after which the page begins anew, and waits for that."""
        # A command may be refused while the page goes; the mark of the old page goes with it.
        self.js(f"document.body.dataset.ready = 'old'; setTimeout(() => {{ {statement} }}, 50); 0")
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                if self.js("document.body?.dataset.ready ?? ''") not in ("old", ""):
                    return
            time.sleep(0.02)
        raise TimeoutError("the report did not begin anew")

    def wait_until_drawn(self, timeout_s: float = 60.0) -> None:
        """Waits for the report that is being loaded."""
        end = time.monotonic() + timeout_s
        while self.js("document.body?.dataset.ready ?? ''") == "":
            if time.monotonic() > end:
                raise TimeoutError(f"the report did not get ready: {self.complaints()}")
            time.sleep(0.02)

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Everything that the page wrote to its console, threw, or was refused."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself and what it holds (data:, blob:) left out."""
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def resize(self, width: int, height: int) -> None:
        """Another window size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, on: bool) -> None:
        """The reader's colour scheme."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def press(self, key: str) -> None:
        """One key on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def click(self, x: float, y: float) -> None:
        """A click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path | str, whole: bool = False) -> None:
        """The window, or the whole page, as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Ends the browser and removes what it wrote."""
        try:
            self.session = None
            self.call("Browser.close", timeout_s=5.0)
        except (OSError, RuntimeError, TimeoutError):
            self.process.kill()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
        shutil.rmtree(self.folder, ignore_errors=True)
