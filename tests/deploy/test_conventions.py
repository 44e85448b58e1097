# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Units, manifests, monitoring, documents and defaults use the ports and paths of
``beluga/conventions.py``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo.test_tidy import ROOT, tracked

from beluga.conventions import (
    ADMIN_PORT,
    EMULATED_ROOT,
    GATEWAY_ADMIN_PORT,
    GATEWAY_PORT,
    RUNTIME_ROOT,
    SETTINGS,
    STANDBY_ADMIN_PORT,
    STATE,
)

yaml = pytest.importorskip("yaml", reason="no PyYAML here (extra check)")

DEPLOY = ROOT / "docs/deploy"
ENV = (DEPLOY / "systemd/beluga.env").read_text()
DROP_IN = (DEPLOY / "systemd/beluga-.service.d/beluga.conf").read_text()
VALUES = yaml.safe_load((DEPLOY / "helm/beluga/values.yaml").read_text())
MONITORING = (ROOT / "docs/operate/monitoring.md").read_text()

# What may follow a root directory in a text: nothing, a path below it, or the end of a sentence.
BELOW = r"(?=$|[/\s`'\"):,;}\]>]|\.(?!\w)|\\n)"
FOLDERS = {
    r"/run/beluga": RUNTIME_ROOT,
    r"/etc/beluga": SETTINGS,
    r"/var/lib/beluga": STATE,
    r"/dev/shm/beluga": EMULATED_ROOT,
}
OF_A_USER = re.compile(r"/dev/shm/beluga-(UID|N|links-|\{|[0-9]+/)")


SUFFIXES = ".md .py .yaml .yml .tpl .txt .conf .env .rules .service"


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked(*SUFFIXES.split()):
        if path.relative_to(ROOT).parts[0] in ("docs", "beluga", "scripts", "README.md"):
            yield path, path.read_text()


@pytest.mark.parametrize("root", FOLDERS, ids=str)
def test_files_use_only_the_shared_directory(root: str) -> None:
    assert str(FOLDERS[root]) == root
    wrong = [
        f"{path.relative_to(ROOT)}: {text[match.start() : match.end() + 20]!r}"
        for path, text in texts()
        for match in re.finditer(re.escape(root), text)
        if not re.match(re.escape(root) + BELOW, text[match.start() :], re.MULTILINE)
        and not OF_A_USER.match(text, match.start())
        and not text[: match.start()].endswith(tuple("abcdefghijklmnopqrstuvwxyz"))
    ]
    assert wrong == []


def test_admin_ports_match_their_component() -> None:
    servers = {0, ADMIN_PORT, STANDBY_ADMIN_PORT}
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts()
        for match in re.finditer(r"--admin[ =]+\"?(?:[\w.\[\]]+:)?(\d{1,5})\b", text)
        if int(match[1]) not in servers | {GATEWAY_ADMIN_PORT}
    ]
    assert wrong == []


def test_the_documented_scrape_config_covers_all_units() -> None:
    served = [int(port) for port in re.findall(r"^BELUGA_\w+=.*--admin (\d+)", ENV, re.MULTILINE)]
    assert served == [ADMIN_PORT, STANDBY_ADMIN_PORT]
    [block] = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", MONITORING, re.DOTALL)
    [job] = yaml.safe_load(block)["scrape_configs"]
    targets = [target for static in job["static_configs"] for target in static["targets"]]
    assert targets == [f"127.0.0.1:{port}" for port in served]


def test_units_and_chart_have_one_pool_and_one_runtime_directory() -> None:
    [pool] = re.findall(r"^BELUGA_POOL=(.*)$", ENV, re.MULTILINE)
    [create] = re.findall(r"^BELUGA_CREATE_OPTIONS=(.*)$", ENV, re.MULTILINE)
    devices = pool.split(":")
    assert [word for word in create.split() if word.startswith("/")] == devices
    assert {Path(device).parent for device in devices} == {EMULATED_ROOT}
    assert Path(VALUES["pool"]["directory"]) == EMULATED_ROOT
    assert f"Environment=BELUGA_RUNTIME_DIR={RUNTIME_ROOT}\n" in DROP_IN
    assert f"RuntimeDirectory={RUNTIME_ROOT.name}\n" in DROP_IN
    assert f"StateDirectory={STATE.name}\n" in DROP_IN


def test_chart_and_commands_have_the_same_ports() -> None:
    assert VALUES["server"]["adminPort"] == ADMIN_PORT
    assert VALUES["gateway"]["port"] == GATEWAY_PORT
    assert f"--port {GATEWAY_PORT} " in ENV
    commands = (ROOT / "docs/reference/commands.md").read_text()  # generated from the commands
    assert f"Default: {GATEWAY_PORT}." in commands
    assert f"Default: 127.0.0.1:{GATEWAY_ADMIN_PORT}." in commands
