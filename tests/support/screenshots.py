# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes the pictures of docs/operate/look.md: ``screenshots.py FOLDER``
(``scripts/dev/screenshots``).

A replay runs meanwhile: some minutes of generated conversations, in a pool that holds part of them.
The picture of ``beluga top`` is the text of its frame, drawn by rich as SVG and shown in the same
browser. The page of ``beluga bench report`` is of a smoke run, and the picture has to show that.
``screenshots.py FOLDER replay`` or ``bench`` takes only those.
"""

import io
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
from rich.console import Console
from support.browser import Browser, find_browser

from beluga.child import start
from beluga.cli.top_frame import draw_frame
from beluga.live import Snapshot

SECONDS = 70.0  # of the replay, before the pictures
REPLAY = ("--admin", "0", "--speed", "0.08", "--pool-bytes", "560M", "--clients", "3")
SIZES = {"light": (1200, 1180, False), "dark": (1200, 1180, True), "narrow": (400, 1100, False)}
TOP_COLUMNS = 80
BENCH = ("rpc", "latency")
BENCH_SIZE = (1100, 1220)


def take(folder: Path, pages: Sequence[str]) -> None:
    """Take the pictures of these parts."""
    program = find_browser()
    if program is None:
        sys.exit("screenshots: this machine lacks Chromium")
    if "replay" in pages:
        take_replay(program, folder)
    if "bench" in pages:
        take_bench(program, folder)


def take_replay(program: str, folder: Path) -> None:
    """Take all pictures of a replay."""
    replay = start(
        "beluga.cli.main", "replay", *REPLAY, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        url = replay.stderr.readline().decode().split()[2].rstrip(",")
        with Browser(program) as browser:
            take_page(browser, url, folder)
            take_top(browser, url, folder)
    finally:
        replay.terminate()
        replay.wait()


def take_page(browser: Browser, url: str, folder: Path) -> None:
    """Take the page once its curves have data."""
    browser.look(1200, 900)
    browser.go(url)
    time.sleep(SECONDS)
    for name, (width, height, dark) in SIZES.items():
        browser.look(width, height, dark=dark)
        time.sleep(2)
        (folder / f"page-{name}.png").write_bytes(browser.picture())
    assert browser.problems == [], browser.problems


def take_top(browser: Browser, url: str, folder: Path) -> None:
    """Take a frame of beluga top."""
    with urllib.request.urlopen(f"{url}live", timeout=30) as answer:  # noqa: S310
        snapshot = msgspec.json.decode(answer.read(), type=Snapshot)
    console = Console(record=True, width=TOP_COLUMNS, file=io.StringIO())
    console.print(draw_frame(snapshot, TOP_COLUMNS))
    with tempfile.TemporaryDirectory() as made:
        picture = Path(made) / "top.svg"
        drawn = console.export_svg(title="beluga top")
        # Its fonts are elsewhere: a browser would show no text until it has them.
        picture.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))
        browser.go(picture.as_uri())
        facts = browser.run(
            "(({width, height}) => [width, height])(document.documentElement.viewBox.baseVal)"
        )
        browser.look(900, int(900 * facts[1] / facts[0]) + 1)
        (folder / "top.png").write_bytes(browser.picture())


def take_bench(program: str, folder: Path) -> None:
    """Take the page of a smoke run of some benchmarks. The top of the page must state that."""
    with tempfile.TemporaryDirectory() as made, Browser(program) as browser:
        page = Path(made) / "page.html"
        words = ("bench", "report", *BENCH, "--smoke", "--out", str(page))
        subprocess.run([sys.executable, "-m", "beluga.cli.main", *words], check=True)
        browser.look(*BENCH_SIZE)
        browser.go(page.as_uri())
        browser.wait("document.readyState == 'complete'")
        shown = browser.run("document.body.innerText.slice(0, 2000)")
        assert "smoke run" in shown.lower(), shown
        (folder / "bench-report.png").write_bytes(browser.picture())
        assert browser.problems == [], browser.problems


if __name__ == "__main__":
    take(Path(sys.argv[1]), sys.argv[2:] or ("replay", "bench"))
