# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga pool`` in this process, with fakes for pools: calls and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from beluga.cli import pool as command
from beluga.cli.app import app
from beluga.cli.pool import scrub_admission
from beluga.errors import NoDefaultPoolError, PoolError
from beluga.pool import DeviceSpec, Pool
from beluga.transfer import EngineFacts


def beluga(*arguments: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@dataclass
class Report:
    """The result of a pool check."""

    finding_count: int = 0
    findings: list[str] = field(default_factory=list)


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls to pools. The default pool is on /a and /b."""
    requests: list[Any] = []
    monkeypatch.setattr("beluga.pool.default_specs", lambda: [Path("/a"), Path("/b")])
    monkeypatch.setattr(
        "beluga.pool.remove_default", lambda: requests.append("remove_default") or True
    )
    monkeypatch.setattr(
        "beluga.pool.stored_specs", lambda: [DeviceSpec(Path(p)) for p in ("/b", "/a")]
    )

    @contextmanager
    def storing_default(specs: Any) -> Iterator[None]:
        requests.append("draft")
        yield
        requests.append(("remember", specs))

    monkeypatch.setattr("beluga.pool.storing_default", storing_default)
    monkeypatch.setattr(command, "_describe", lambda pool, json: requests.append(("shown", json)))
    monkeypatch.setattr(Pool, "destroy", lambda specs, force: requests.append(("destroy", specs)))
    return requests


def test_a_check_shows_what_it_found_and_fails(
    did: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Report(2, ["one is torn", "two is gone"])

    def check_devices(*what: Any, **how: Any) -> Report:
        did.append((what, how))
        return found

    monkeypatch.setattr("beluga.index.check_devices", check_devices)
    shown = beluga("pool", "check")
    assert str(shown.exception) == (
        "the check has 2 findings; damaged blocks read as misses; use --repair to drop them"
    )
    assert shown.stderr == "one is torn\ntwo is gone\n"
    assert "findings" in shown.stdout and "finding_count" not in shown.stdout
    assert "torn" not in shown.stdout
    assert isinstance(beluga("pool", "check", "--payload", "--json").exception, PoolError)
    found.finding_count = 0
    assert beluga("pool", "check", "--pool", "p").exit_code == 0
    assert did == [
        (([Path("/a"), Path("/b")],), {}),
        (([Path("/a"), Path("/b")],), {"payload": True, "admission": scrub_admission}),
        ((["p"],), {}),
    ]


def test_a_repair_reports_its_changes(did: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        def __enter__(self) -> str:
            return "opened"

        def __exit__(self, *_: object) -> None: ...

    def repair_pool(pool: object, **how: bool) -> Any:
        did.append((pool, how))
        return ["dropped it"], Report()

    monkeypatch.setattr(command, "open_pool", lambda paths: Opened())
    monkeypatch.setattr("beluga.index.repair_pool", repair_pool)
    shown = beluga("pool", "check", "--repair", "--declare-gone", "--json")
    assert shown.stderr == "dropped it\n"
    assert json.loads(shown.stdout) == {"finding_count": 0, "findings": []}
    beluga("pool", "check", "--repair", "--payload")
    assert did == [
        ("opened", {"payload": False, "declared_gone": True}),
        ("opened", {"payload": True, "declared_gone": False}),
    ]


def test_destroy_removes_the_default_pool(did: list[Any]) -> None:
    assert beluga("pool", "destroy", stdin="n\n").exit_code == 1
    assert did == []
    destroyed = beluga("pool", "destroy", stdin="y\n")
    assert "Destroy the pool on /a, /b?" in destroyed.stderr
    assert did == [("destroy", ["/a", "/b"]), "remove_default"]
    del did[:]
    result = json.loads(beluga("pool", "destroy", "--yes", "/c", "--json").stdout)
    assert did == [("destroy", ["/c"])]
    assert result == {"destroyed": ["/c"], "forgotten": False}
    del did[:]
    result = json.loads(beluga("pool", "destroy", "--yes", "/a", "/b", "--json").stdout)
    assert did == [("destroy", ["/a", "/b"]), "remove_default"]
    assert result["forgotten"] is True


def test_mount_stores_the_default_pool(
    did: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "emulated"
    specs = [str(folder / "0"), str(folder / "1")]
    made: list[Any] = []

    class Opened:
        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("beluga.pool.emulated_paths", lambda: specs)
    monkeypatch.setattr(Pool, "open", lambda paths: made.append(paths) or Opened())
    monkeypatch.setattr(Pool, "create", lambda paths, **how: made.append((paths, how)) or Opened())
    beluga("mount")
    assert not folder.exists()
    beluga("mount", "--create", "--size", "16M", "--lanes", 3, "--json")
    assert folder.stat().st_mode & 0o777 == 0o700
    remember = ("remember", specs)
    assert did == ["draft", ("shown", False), remember, "draft", ("shown", True), remember]
    assert made[0] == specs
    how = made[1][1]
    del how["progress"]
    assert made[1] == (specs, {
        "device_size": 16 << 20, "interleave": True, "coherence": None, "metadata": None,
        "metadata_coherence": None, "sparse": False,
        "force": False, "max_blocks": None, "block_bytes": None, "lane_count": 3,
        "bulk_size": None,
    })  # fmt: skip


def test_a_missing_default_pool_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beluga.pool.remove_default", lambda: False)
    assert isinstance(beluga("umount").exception, NoDefaultPoolError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"why_none": "no"}, "cpu (not here: dsa; --json has the reasons)"),
        ({"memory": "gpu"}, "cpu; dsa for blocks in GPU memory"),
        ({}, "cpu; dsa (q) from 4 KiB written, never read, by default"),
        ({"measured": True, "read": 8192},
         "cpu; dsa (q) from 4 KiB written, from 8 KiB read, as measured"),
    ],
)  # fmt: skip
def test_the_copy_engine_is_reported_in_a_line(change: dict[str, Any], message: str) -> None:
    known = {"memory": "host", "device": "q", "why_none": None, "written": 4096}
    assert command._engines({"dsa": EngineFacts(**known | change)}) == message


def test_a_default_size_is_reported(
    did: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Opened(SimpleNamespace):
        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None: ...

    made = Opened(geometry=SimpleNamespace(device_size=3 << 30))
    monkeypatch.setattr(Pool, "create", lambda paths, **how: made)
    path = tmp_path / "device"
    output = beluga("pool", "create", path).stderr
    assert "each device has 3 GiB: new files share half of what is free (see --size)" in output
    assert "half" not in beluga("pool", "create", path, "--size", "3G").stderr
    path.touch()
    assert "half" not in beluga("pool", "create", path).stderr


def test_mount_prints_the_pool_that_has_priority(
    did: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BELUGA_POOL and beluga.toml come before what is mounted."""
    monkeypatch.setattr(command, "_show_existing", lambda *_, **__: None)
    settings = tmp_path / "beluga.toml"
    settings.write_text('pool = ["/c"]\n')
    monkeypatch.setenv("BELUGA_CONFIG", str(settings))
    monkeypatch.delenv("BELUGA_POOL", raising=False)
    notice = "other commands use {}: {} overrides the mounted pool\n"
    assert beluga("mount", "/a").stderr == notice.format("/c", "beluga.toml")
    assert beluga("mount", "/c").stderr == ""
    monkeypatch.setenv("BELUGA_POOL", "/d:/e")
    assert beluga("mount", "/a").stderr == notice.format("/d, /e", "BELUGA_POOL")
    assert beluga("mount", "/e", "/d").stderr == ""
