"""Drives a headless Chromium over the pipe of its DevTools protocol: no driver, no port, no package.

    with Chromium(find_chromium()) as browser:
        page = browser.open("http://127.0.0.1:8000/", width=390, height=844, dark=True)
        page.wait_for("document.querySelector('#state').textContent === 'ready'")

The protocol: https://chromedevtools.github.io/devtools-protocol; its messages are JSON that ends with a zero byte. With
--remote-debugging-pipe the browser reads them from descriptor 3 and writes them to descriptor 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot have; every page is this project's own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    # No name leads anywhere: a page that asks another host fails to, and the browser itself reaches none either.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
WAIT_S = 20.0
"""For an answer of the browser, and for a condition unless said."""
KEYS: Mapping[str, tuple[int, str]] = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "Space": (32, " ")}
"""Virtual key code and text of keys that are no letter."""
SHIFT = 8


class BrowserError(RuntimeError):
    """The browser refused a command, a script in the page failed, or what was waited for did not come."""


def find_chromium() -> str | None:
    """The command of JAXINFER_CHROMIUM, or of the first that is installed under a usual name; None: there is none."""
    names = (os.environ["JAXINFER_CHROMIUM"],) if "JAXINFER_CHROMIUM" in os.environ else NAMES
    return next(filter(None, map(shutil.which, names)), None)


class Chromium:
    """A browser with a profile of its own, which ends with it."""

    def __init__(self, command: str):
        self._profile = tempfile.TemporaryDirectory(prefix="jaxinfer-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        # The shell moves the ends of the pipes to the descriptors that the browser reads and writes.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", command, *FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._num_sent = 0
        self._replies: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        try:
            self.version: str = self.send("Browser.getVersion")["product"]
        except BaseException:
            self.close()
            raise

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1.0) -> Page:
        """A page in a session of its own: other pages share no storage with it. width, height: in CSS pixels."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.set_size(width, height, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=url)
        page.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")
        return page

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. BrowserError where there is none in WAIT_S."""
        self._num_sent += 1
        number = self._num_sent
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        limit_s = time.monotonic() + WAIT_S
        while number not in self._replies:
            self._receive(limit_s - time.monotonic(), method)
        reply = self._replies.pop(number)
        if "error" in reply:
            raise BrowserError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _receive(self, timeout_s: float, method: str) -> None:
        """Reads what has come, at least something: replies, and events, which are told to their page."""
        if timeout_s <= 0 or not select.select([self._answers], [], [], timeout_s)[0]:
            raise BrowserError(f"{method}: the browser gave no answer in {WAIT_S:g} s")
        piece = os.read(self._answers, 2**20)
        if not piece:
            raise BrowserError(f"{method}: the browser ended with status {self._process.wait(WAIT_S)}")
        *messages, self._unread = (self._unread + piece).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            elif page := self._pages.get(message.get("sessionId", "")):
                page.tell(message["method"], message["params"])

    def close(self) -> None:
        """Ends the browser and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Page:
    """A tab, and what happened in it."""

    def __init__(self, browser: Chromium, session: str):
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        """The addresses that it asked, in order."""
        self.complaints: list[str] = []
        """Uncaught errors, warnings and errors of the console, and violations of the page's policy."""
        self.failed_loads: list[str] = []
        """What the console says of replies that are errors and of those that never came."""

    def tell(self, event: str, params: Mapping[str, Any]) -> None:
        """An event of the protocol."""
        match event:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["source"] == "network":
                self.failed_loads.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise. BrowserError where it throws."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """The text that an element shows; empty where it is hidden."""
        find = f"const node = document.querySelector({json.dumps(selector)})"
        return self.evaluate(f"(() => {{ {find}; return node.checkVisibility() ? node.innerText : ''; }})()")

    def wait_for(self, condition: str, timeout_s: float = WAIT_S) -> None:
        """Until the expression is true. BrowserError, with what the page shows, where it never is."""
        limit_s = time.monotonic() + timeout_s
        while not self.evaluate(condition):
            if time.monotonic() > limit_s:
                shown = self.evaluate("document.body.innerText")
                raise BrowserError(f"not so in {timeout_s:g} s: {condition}; the page shows {shown!r}")
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key of KEYS, down and up."""
        code, text = KEYS[key]
        same = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
        self.send("Input.dispatchKeyEvent", type="keyUp", **same)

    def type(self, text: str) -> None:
        """Puts text where the focus is."""
        self.send("Input.insertText", text=text)

    def focus(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        find = f"const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(() => {{ {find}; return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def set_size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def screenshot(self) -> bytes:
        """What is on the screen, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
