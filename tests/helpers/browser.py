"""A headless Chromium for the tests, spoken to over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "GEMS_REQUIRE_BROWSER"
START_S = 90.0
ANSWER_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_browser() -> str:
    """Return the path of a Chromium; skips the test where there is none and none is required."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        assert not os.environ.get(REQUIRED), (
            f"{REQUIRED} is set, and there is no {NAMES[0]} on the path"
        )
        pytest.skip(f"no {NAMES[0]} on the path (apt-get install chromium)")
    return found


class Page:
    """One page of the browser.

    `errors` are lines of the console and exceptions, `requests` all addresses asked for.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._last = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Call a method of the protocol and waits for its answer."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": values}))
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            told = json.loads(self._socket.recv(timeout=end - time.monotonic()))
            if told.get("id") == self._last:
                assert "error" not in told, told["error"]
                answer: dict[str, Any] = told["result"]
                return answer
            if "method" in told:
                self.events.append(told)
        raise AssertionError(f"no answer to {method}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and gives its value."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    def open(self, path: Path, width_px: int = 1280, height_px: int = 900) -> None:
        """Open a file and waits until it is loaded."""
        self.resize(width_px, height_px)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width_px: int, height_px: int) -> None:
        """Return the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=height_px,
            deviceScaleFactor=1,
            mobile=False,
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move the mouse, turns its wheel, presses or releases its button, at a place of the page that is seen."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path) -> Path:
        """Keep what is seen of the page as a PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
        return path

    @property
    def errors(self) -> list[str]:
        """All that the console said, exceptions among it."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in names]

    @property
    def requests(self) -> list[str]:
        """The address of each request, but for data within the page."""
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        addresses = [str(event["params"]["request"]["url"]) for event in asked]
        return [address for address in addresses if not address.startswith("data:")]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own in a folder, and gives its page."""
    from websockets.sync.client import connect

    path = find_browser()
    with (folder / "browser.log").open("w") as log:
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = _address(process, folder)
        with connect(address, max_size=None, open_timeout=START_S, proxy=None) as socket:
            yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until the browser says where it listens, and gives the address of its page."""
    from urllib.request import ProxyHandler, build_opener

    said = folder / "profile" / "DevToolsActivePort"
    end = time.monotonic() + START_S
    ask = build_opener(ProxyHandler({})).open
    while time.monotonic() < end:
        assert process.poll() is None, (folder / "browser.log").read_text()
        if said.exists() and len(lines := said.read_text().splitlines()) == 2:
            with ask(f"http://127.0.0.1:{lines[0]}/json", timeout=START_S) as answer:
                pages = [page for page in json.loads(answer.read()) if page["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError("the browser did not start:\n" + (folder / "browser.log").read_text())
