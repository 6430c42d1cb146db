"""A headless Chromium over the pipe of its DevTools protocol: no driver, no port, no package. Standard library alone.

https://chromedevtools.github.io/devtools-protocol/ : messages are JSON, each ended by a zero byte, on descriptors 3 and
4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

TIMEOUT = 30


class Browser:
    """One page in one browser process. ``messages`` are what the page logged, and errors of loading it."""

    def __init__(self, program: str, profile: Path):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        words = [program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "browser", *words],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._id, self._session = b"", 0, None
        self.messages: list[str] = []
        self.events: list[str] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command. Raises AssertionError for an error and for no answer in TIMEOUT seconds."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of that size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.events:
            self._next()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(TIMEOUT)
        os.close(self._read)
        os.close(self._write)

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        until = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready = select.select([self._read], [], [], max(0, until - time.monotonic()))[0]
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"the browser ended with {self._process.wait(TIMEOUT)}"
            self._buffer += chunk
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        self.events.append(message.get("method", ""))
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            self.messages.append(str([item.get("value") for item in params["args"]]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.events.append(f"request {params['request']['url'][:200]}")
        return message
