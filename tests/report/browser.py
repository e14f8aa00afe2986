"""A real browser, driven over WebDriver's JSON with nothing but the standard library."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",  # a page that is still scrolling has nothing to click at
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver names an element
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "escape": "\ue00c"}


def missing() -> str | None:
    """Which part of a browser this machine lacks, or None."""
    if _chromium() is None:
        return "there is no Chromium on this machine"
    return None if shutil.which("chromedriver") else "there is no chromedriver on this machine"


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A session: open a page, run script in it, click, press keys, and read what the console said."""

    def __init__(self, base: str, session: str) -> None:
        self.base, self.session = base, session

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return _request(method, f"{self.base}/session/{self.session}{path}", body)

    def open(self, page: Path) -> None:
        self.call("POST", "/url", {"url": page.resolve().as_uri()})

    def resize(self, width: int, height: int) -> None:
        """The size of a phone: a window itself can't be that narrow."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Run ``script`` until it gives something true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"this never became true: {script}; the console says {self.console()}")

    def find(self, selector: str) -> str:
        return self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        """A click of the pointer at the element, through everything that a person's click goes through."""
        self.call("POST", f"/element/{self.find(selector)}/click", {})

    def press(self, key: str) -> None:
        stroke = [{"type": "keyDown", "value": KEYS[key]}, {"type": "keyUp", "value": KEYS[key]}]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": stroke}]})

    def hover(self, selector: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: self.find(selector)}}
        self.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def console(self) -> list[str]:
        """What went wrong since the last call, in the browser's words."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]


@contextlib.contextmanager
def browser(width: int = 1200, height: int = 900, *flags: str) -> Iterator[Browser]:
    """A headless Chromium with an empty profile, closed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        base = f"http://127.0.0.1:{port}"
        try:
            _until_ready(base)
            arguments = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"binary": _chromium(), "args": arguments},
                "goog:loggingPrefs": {"browser": "WARNING"},
            }
            started = _request("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = Browser(base, started["sessionId"])
            try:
                yield session
            finally:
                session.call("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(timeout=20)


def _until_ready(base: str) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            if _request("GET", f"{base}/status", None)["ready"]:
                return
        time.sleep(0.1)
    raise AssertionError("chromedriver did not start within 20 seconds")


def _request(method: str, url: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # Straight to the driver, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(json.load(error)["value"]["message"]) from None
