# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A headless Chromium for tests and screenshots, controlled over its DevTools protocol through two
pipes (``--remote-debugging-pipe``: descriptors 3 and 4, JSON with a zero byte after each message).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb"),
    "--remote-debugging-pipe",
)
_ANSWER_S = 60.0


def find_browser() -> str | None:
    """Return the path of Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a new, empty profile. ``problems`` has the errors of its console."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="beluga-browser-", ignore_cleanup_errors=True
        )
        self.problems: list[str] = []
        self._number, self._buffer = 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        read, self._write = os.pipe()
        self._read, write = os.pipe()

        def place_pipes() -> None:  # in the child
            low = os.dup(read), os.dup(write)
            os.dup2(low[0], 3)
            os.dup2(low[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,  # noqa: PLW1509  there are no threads yet
            pass_fds=(3, 4),
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._session: str | None = None
        try:
            (page,) = [
                target
                for target in self._call("Target.getTargets")["targetInfos"]
                if target["type"] == "page"
            ]
            attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and whether the user prefers dark colors."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        """Open a page."""
        reply = self._call("Page.navigate", url=url)
        assert not reply.get("errorText"), reply

    def run(self, script: str) -> Any:
        """Return the value of an expression of the page."""
        reply = self._evaluate(script)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def _evaluate(self, script: str) -> dict[str, Any]:
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)

    def wait(self, script: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression of the page is true; return its value. A page that has not
        loaded yet may fail to evaluate it.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if value := self._evaluate(script)["result"].get("value"):
                return value
            time.sleep(0.05)
        raise AssertionError(f"after {timeout_s} s still not: {script}; {self.text()[:2000]}")

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.run("document.body.innerText"))

    def picture(self) -> bytes:
        """Return what the window shows as a PNG."""
        reply = self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(reply["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _ANSWER_S
        while self._number not in self._answers:
            self._receive(until)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _receive(self, until: float) -> None:
        if not select.select([self._read], [], [], max(until - time.monotonic(), 0))[0]:
            raise AssertionError("the browser does not answer")
        output = os.read(self._read, 1 << 16)
        if not output:
            raise AssertionError("the browser has ended")
        *messages, self._buffer = (self._buffer + output).split(b"\0")
        for text in messages:
            self._note(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        parameters = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:1000])
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(
                f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
            )
        elif message["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(json.dumps(parameters["args"])[:1000])

    def close(self) -> None:
        """End the browser and all of its processes."""
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
