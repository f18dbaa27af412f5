"""A headless chromium, told what to do over its DevTools protocol."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from websockets.sync.client import ClientConnection, connect

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PATIENCE = 120  # seconds
ALONE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-extensions",
    "--remote-debugging-port=0",
    "about:blank",
)


class Tab:
    """One page; `said` is what its console and its exceptions told, `asked` the addresses it asked
    for.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.said: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its result; what happens meanwhile is noted."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == self._count:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Log.entryAdded":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"]))
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait, a picture at a time, until a condition holds."""
        self.js(
            f"new Promise(done => {{ const look = () => ({condition}) ? done() : setTimeout(look, 10); look(); }})"
        )

    def go(self, address: str) -> None:
        """Open a page that has become ready."""
        self.do("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Be as wide and high as a screen, and of its colours."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])


class Browser:
    """A running chromium."""

    def __init__(self, port: int) -> None:
        self._port = port

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """A page of its own, without what others stored."""
        with connect(
            httpx.get(f"http://127.0.0.1:{self._port}/json/version").json()["webSocketDebuggerUrl"]
        ) as root:
            tab = Tab.__new__(Tab)
            tab._socket, tab._count, tab.said, tab.asked = root, 0, [], []
            context = tab.do("Target.createBrowserContext")["browserContextId"]
            target = tab.do("Target.createTarget", url="about:blank", browserContextId=context)[
                "targetId"
            ]
            with connect(
                f"ws://127.0.0.1:{self._port}/devtools/page/{target}", max_size=None
            ) as socket:
                yield Tab(socket)
            tab.do("Target.disposeBrowserContext", browserContextId=context)


@contextmanager
def browsing(home: Path) -> Iterator[Browser]:
    """Start one in a folder of its own, and end it."""
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    words = [str(BROWSER), f"--user-data-dir={home}", *ALONE]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, text=True
    ) as process:
        try:
            assert process.stderr is not None
            port = next(
                int(line.rsplit(":", 1)[1].split("/")[0])
                for line in process.stderr
                if "listening on" in line
            )
            # What it says later must not fill the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Browser(port)
        finally:
            process.terminate()
            process.wait(PATIENCE)
