# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga pool``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from beluga.cli import pool as command
from beluga.cli import pool as commands
from beluga.cli.app import app
from beluga.cli.pool import scrub_admission
from beluga.errors import DeviceMissingError, NoDefaultPoolError, PoolError
from beluga.pool import DeviceSpec, Pool, storing_default
from beluga.transfer import ENGINES, EngineFacts
from tests.transfer import stand_in

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def paths(shm: Path) -> list[str]:
    """The paths of devices that do not exist yet."""
    return [str(shm / "a"), str(shm / "b")]


def test_mount_shows_the_mapping_and_stores_the_default_pool(run: Run, paths: list[str]) -> None:
    mounted = run("mount", *paths, "--create", "--size", "16M")
    assert mounted.returncode == 0, mounted.stderr
    assert all(path in mounted.stdout for path in paths)
    assert "16 MiB" in mounted.stdout
    info = json.loads(run("pool", "info", "--json").stdout)
    assert [device["path"] for device in info["devices"]] == paths
    assert info["devices"][0]["stripe_count"] == 8


def test_info_shows_the_cache_maintenance_of_copies(
    run: Run, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BELUGA_DDIO", raising=False)
    monkeypatch.delenv("BELUGA_MEMORY", raising=False)
    created = run("mount", *paths, "--create", "--size", "16M")
    assert "unknown" in created.stdout
    policy = json.loads(run("pool", "info", "--json").stdout)["policy"]
    assert (policy["memory"], policy["ddio"]) == ("write-back", "unknown")
    assert policy["rows"]["gpu"] == {"before_read": "invalidate", "after_write": "flush"}
    assert policy["rows"]["cpu"] == {"before_read": "invalidate", "after_write": "fence"}


def test_info_shows_the_copying_engines(
    run: Run, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ENGINES["dsa"].why_none() is not None:
        assert "not here: dsa" in run("mount", *paths, "--create", "--size", "16M").stdout
        engines = json.loads(run("pool", "info", "--json").stdout)["engines"]
        assert engines["dsa"]["why_none"] == ENGINES["dsa"].why_none()
    stand_in.install(monkeypatch)
    no_gpu = dataclasses.replace(ENGINES["cuda"], why_none=lambda: "no GPU")
    monkeypatch.setitem(ENGINES, "cuda", no_gpu)
    facts: list[dict[str, str]] = []
    monkeypatch.setattr(commands, "print_facts", facts.append)
    with Pool.create(paths, device_size=16 << 20, force=True) as pool:
        commands._describe(pool, json=False)
    assert facts[0]["engines"] == (
        "cpu; dsa (software queue) from 16 KiB written, from 16 KiB read, by default (not here: "
        "cuda; --json has the reasons)"
    )


def test_mounting_again_keeps_the_pool(run: Run, paths: list[str]) -> None:
    first = json.loads(run("mount", *paths, "--create", "--size", "16M", "--json").stdout)
    again = json.loads(run("mount", *reversed(paths), "--json").stdout)
    assert again["pool"] == first["pool"]


def test_mounting_a_file_without_a_pool_is_rejected(run: Run, paths: list[str]) -> None:
    Path(paths[0]).write_bytes(bytes(8 << 20))
    refused = run("mount", paths[0])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"beluga mount: error: {paths[0]} holds no pool")
    assert refused.stderr.count("\n") == 1
    assert run("umount").returncode == 1, "a rejected pool is not stored"


def test_umount_removes_the_default_pool(run: Run, paths: list[str]) -> None:
    run("mount", *paths, "--create", "--size", "16M")
    assert run("umount").returncode == 0
    refused = run("umount")
    assert (refused.returncode, refused.stderr) == (
        1,
        "beluga: error: no pool is mounted; there is nothing to do\n",
    )
    assert all(Path(path).exists() for path in paths)


def test_create_refuses_to_overwrite_a_pool(run: Run, paths: list[str]) -> None:
    assert run("pool", "create", *paths, "--size", "16M").returncode == 0
    refused = run("pool", "create", *paths, "--size", "16M")
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert run("pool", "create", *paths, "--size", "16M", "--force").returncode == 0


def test_options_reach_the_superblock(run: Run, paths: list[str]) -> None:
    options = ["--no-interleave", "--coherence", "software", "--sparse", "--lanes", "5"]
    run("pool", "create", *paths, "--size", "16M", "--max-blocks", "77", *options)
    info = json.loads(run("pool", "info", "--json", "--pool", paths[0], "--pool", paths[1]).stdout)
    assert info["geometry"]["interleaved"] is False
    assert info["geometry"]["block_count_max"] == 77
    assert info["geometry"]["lane_count"] == 5
    assert {device["coherence"] for device in info["devices"]} == {"software"}
    assert all(device["sparse"] for device in info["devices"])


def test_check_finds_a_damaged_superblock(run: Run, pool: list[str]) -> None:
    assert json.loads(run("pool", "check", *pool, "--json").stdout)["finding_count"] == 0
    with Path(pool[1]).open("r+b") as device:
        device.seek(100)
        device.write(b"damage")
    damaged = run("pool", "check", *pool)
    assert damaged.returncode == 1
    assert f"superblock-damaged {pool[1]}" in damaged.stdout + damaged.stderr


@pytest.mark.usefixtures("server")
def test_check_finds_a_changed_byte(run: Run, pool: list[str]) -> None:
    run("put", "key", "-", *pool, stdin="precious " * 1000)
    assert run("pool", "check", "--payload", *pool).returncode == 0
    for path in map(Path, pool[1::2]):
        path.write_bytes(path.read_bytes().replace(b"precious", b"spurious", 1))
    ended = run("pool", "check", "--payload", "--json", *pool)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["finding_count"] == 1


def test_destroy_removes_the_files(run: Run, pool: list[str]) -> None:
    paths = pool[1::2]
    assert run("pool", "destroy", *paths, stdin="n\n").returncode == 1
    unasked = run("pool", "destroy", *paths, stdin="")
    assert (unasked.returncode, unasked.stderr.count("\n")) == (2, 1)
    assert "there is nobody to confirm it; give --yes" in unasked.stderr
    assert Path(paths[0]).exists()
    assert run("pool", "destroy", *paths, "--yes").returncode == 0
    assert not any(Path(path).exists() for path in paths)


def test_a_check_of_a_file_without_a_pool_advises_no_repair(run: Run, paths: list[str]) -> None:
    for content in (b"no pool " * 1024, bytes(8 << 20)):
        Path(paths[0]).write_bytes(content)
        checked = run("pool", "check", "--pool", paths[0])
        assert (checked.returncode, checked.stderr.count("\n")) == (2, 1)
        assert "name a pool, or make one: beluga pool create" in checked.stderr
        assert "--repair" not in checked.stderr


def test_destroying_part_of_a_pool_requires_force(run: Run, pool: list[str]) -> None:
    paths = pool[1::2]
    refused = run("pool", "destroy", paths[0], "--yes")
    assert refused.returncode == 2
    assert "has 2 devices, and 1 of them are not named" in refused.stderr
    assert all(Path(path).exists() for path in paths)
    assert run("pool", "destroy", paths[0], "--yes", "--force").returncode == 0
    assert [Path(path).exists() for path in paths] == [False, True]
    assert run("pool", "destroy", paths[1], "--yes", "--force").returncode == 0


def test_each_device_has_and_shows_its_coherence(run: Run, shm: Path) -> None:
    paths = [shm / "a", shm / "b"]
    mixed = ["--coherence", "software", "--coherence", "hardware"]
    assert run("pool", "create", *paths, "--size", "16M", "--sparse", *mixed).returncode == 0
    named = ["--pool", paths[1], "--pool", paths[0]]
    info = json.loads(run("pool", "info", *named, "--json").stdout)
    assert [device["coherence"] for device in info["devices"]] == ["software", "hardware"]
    shown = run("pool", "info", *named).stdout
    assert shown.count("software") == 1
    assert shown.count("hardware") == 1


def test_a_mount_that_cannot_be_stored_creates_no_pool(
    start: Start, paths: list[str], tmp_path: Path
) -> None:
    (tmp_path / "state").touch()  # where the start fixture's users keep their state
    child = start("mount", *paths, "--create", "--size", "16M")
    output = child.communicate(timeout=60)[1]
    assert child.returncode == 1
    assert output.count("\n") == 1
    assert not any(Path(path).exists() for path in paths)


def test_a_check_prints_its_findings_as_text(run: Run, pool: list[str]) -> None:
    shown = run("pool", "check", *pool).stdout
    assert all(word in shown for word in ("tables", "half 1", "serving", "no", "sessions"))
    assert "_" not in shown
    assert {"half", "serving", "block_count"} <= json.loads(
        run("pool", "check", *pool, "--json").stdout
    ).keys()


def test_a_removed_pool_and_an_unmounted_pool_have_different_errors(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("beluga.pool.emulated_paths", lambda: paths)
    with pytest.raises(DeviceMissingError, match="there is no emulated pool in"):
        commands.mount(new=commands.new_pool())
    with storing_default(paths):
        Pool.create(paths, device_size=8 << 20).close()
    for path in paths:
        Path(path).unlink()
    with pytest.raises(NoDefaultPoolError, match="of the mounted pool is missing: it was removed"):
        commands.mount(new=commands.new_pool())


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
    report = Report(2, ["one is torn", "two is gone"])

    def check_devices(*what: Any, **how: Any) -> Report:
        did.append((what, how))
        return report

    monkeypatch.setattr("beluga.index.check_devices", check_devices)
    shown = beluga("pool", "check")
    assert str(shown.exception) == (
        "the check has 2 findings; damaged blocks read as misses; use --repair to drop them"
    )
    assert shown.stderr == "one is torn\ntwo is gone\n"
    assert "findings" in shown.stdout and "finding_count" not in shown.stdout
    assert "torn" not in shown.stdout
    assert isinstance(beluga("pool", "check", "--payload", "--json").exception, PoolError)
    report.findings = ["superblock-format a: a Beluga with other structs made it"] * 2
    assert "use the Beluga that made the pool" in str(beluga("pool", "check").exception)
    report.finding_count = 0
    assert beluga("pool", "check", "--pool", "p").exit_code == 0
    assert did == [
        (([Path("/a"), Path("/b")],), {}),
        (([Path("/a"), Path("/b")],), {"payload": True, "admission": scrub_admission}),
        (([Path("/a"), Path("/b")],), {}),
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
    for answer in ("n\n", ""):
        refused = beluga("pool", "destroy", stdin=answer)
        assert (refused.exit_code, did) == (1, [])
        assert refused.stderr.endswith("not confirmed, so nothing was changed; give --yes\n")
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
    facts = {"memory": "host", "device": "q", "why_none": None, "written": 4096}
    assert command._engines({"dsa": EngineFacts(**facts | change)}) == message


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
