# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page in a headless Chromium: a live replay, names that contain HTML, and killed servers."""

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import Browser, find_browser

from beluga import KVCache, Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., "subprocess.Popen[str]"]
HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
STATE = "document.getElementById('state').textContent"
SESSIONS = "document.getElementById('table-sessions').parentElement.querySelectorAll('tbody tr')"
PIXELS = "[...document.querySelectorAll('canvas')].map((one) => one.toDataURL()).join()"


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium: scripts/dev/setup-packages chromium")
    with Browser(program) as browser:
        browser.look(1280, 900)
        yield browser


def page_of(process: subprocess.Popen[str]) -> str:
    """Return the address of the page that a command prints."""
    assert process.stderr
    output = process.stderr.readline()
    assert output.startswith("page at http://127.0.0.1:"), output
    return output.split()[2].rstrip(",")


def figure(browser: Browser, title: str) -> str:
    """Return the figure of a card."""
    return str(
        browser.run(
            "[...document.querySelectorAll('#cards article')].find((card) => "
            f"card.querySelector('h2').textContent === '{title}')"
            ".querySelector('.figure').textContent"
        )
    )


def moves(browser: Browser, title: str) -> None:
    """Wait until a card shows another figure."""
    before = figure(browser, title)
    browser.wait(
        "[...document.querySelectorAll('#cards article')].some((card) => "
        f"card.querySelector('h2').textContent === '{title}' && "
        f"card.querySelector('.figure').textContent !== '{before}')"
    )


def test_a_live_replay_updates_the_figures_charts_and_map(browser: Browser, start: Start) -> None:
    browser.go(page_of(start("replay", "--admin", "0", "--speed", "0.1", "--no-compare")))
    browser.wait(f"{STATE} === 'serving, epoch 1'")
    browser.wait(f"{SESSIONS}.length === 2")
    before = browser.run(PIXELS)
    for title in ("Calls", "Pool full"):
        moves(browser, title)
    browser.wait(f"({PIXELS}) !== {before!r}".replace("\n", ""))
    browser.wait("document.querySelector('#curve-calls path').getAttribute('d').includes('L')")
    for at in (0, 3):  # a click without coordinates, as from a keyboard, in each half of the map
        browser.run(
            "document.querySelector('canvas').dispatchEvent("
            f"new KeyboardEvent('keydown', {{key: ['ArrowRight', 'ArrowDown'][{at} % 2]}}))"
        )
    assert "blocks use" in browser.run("document.getElementById('cell').textContent")
    browser.look(400, 800)
    browser.wait("document.documentElement.scrollWidth <= 400")
    browser.look(1280, 900, dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 13, 13)"
    assert browser.problems == []


def test_names_of_clients_are_escaped(browser: Browser, start: Start, shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True) as pool:
        server = start("serve", "--pool", str(shm / "a"), "--admin", "0")
        url = page_of(server)
        assert server.stderr
        assert server.stderr.readline().startswith("serving")
        with KVCache(pool, namespace=HOSTILE) as cache:
            cache.put([b"k" * 16], np.zeros((1, 4096), np.uint8))
        browser.go(url)
        browser.wait(f"document.body.textContent.includes({HOSTILE!r})")
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
        assert browser.run("document.title") == "Beluga"
    assert browser.problems == []


def test_a_killed_server_and_the_next_one_are_shown(
    browser: Browser, start: Start, shm: Path
) -> None:
    pool = ["--pool", str(shm / "a")]
    Pool.create([shm / "a"], device_size=32 << 20, sparse=True).close()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = start("serve", *pool, "--admin", port)
    url = page_of(server)
    browser.go(url)
    browser.wait(f"{STATE} === 'serving, epoch 1'")
    server.send_signal(signal.SIGKILL)
    server.wait()
    browser.wait(f"{STATE} === 'no answer'")
    assert "trying again" in browser.run("document.getElementById('notes').textContent")
    page_of(start("serve", *pool, "--admin", port))
    browser.wait(f"{STATE} === 'serving, epoch 2'")
    browser.wait("document.getElementById('notes').textContent === ''")
    standby = start("serve", *pool, "--standby", "--admin", "0")
    browser.go(page_of(standby))
    browser.wait(f"{STATE}.startsWith('standing by')")
    refused = [line for line in browser.problems if "ERR_CONNECTION_REFUSED" not in line]
    assert refused == []  # the browser itself logs connections that fail


def test_the_dashboard_command_serves_the_page_of_a_server_without_a_port(
    browser: Browser, start: Start, shm: Path
) -> None:
    pool = ["--pool", str(shm / "a")]
    Pool.create([shm / "a"], device_size=32 << 20, sparse=True).close()
    command = start("dashboard", *pool)
    assert command.stdout
    browser.go(command.stdout.readline().strip())
    browser.wait(f"{STATE} === 'no answer'")
    assert "beluga serve" in browser.run("document.getElementById('notes').textContent")
    start("serve", *pool)
    browser.wait(f"{STATE} === 'serving, epoch 1'")
    command.send_signal(signal.SIGINT)
    assert command.wait(timeout=20) == 0
