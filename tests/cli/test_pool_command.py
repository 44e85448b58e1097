# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga mount``, ``umount`` and ``pool``: their output, the default pool, and refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from beluga.cli import pool as commands
from beluga.errors import DeviceMissingError, NoDefaultPoolError
from beluga.pool import Pool, storing_default
from beluga.transfer import ENGINES
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
        "cpu; dsa (stand-in) from 13.4 KiB written, from 5.1 KiB read, by default costs, not "
        "measured yet (not here: cuda; --json has the reasons)"
    )


def test_mounting_again_keeps_the_pool(run: Run, paths: list[str]) -> None:
    first = json.loads(run("mount", *paths, "--create", "--size", "16M", "--json").stdout)
    again = json.loads(run("mount", *reversed(paths), "--json").stdout)
    assert again["pool"] == first["pool"]


def test_mounting_a_file_without_a_pool_is_rejected(run: Run, paths: list[str]) -> None:
    Path(paths[0]).write_bytes(bytes(8 << 20))
    refused = run("mount", paths[0])
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"beluga: error: {paths[0]} holds no pool")
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
    found = run("pool", "check", "--payload", "--json", *pool)
    assert found.returncode == 1
    assert json.loads(found.stdout)["finding_count"] == 1


def test_destroy_removes_the_files(run: Run, pool: list[str]) -> None:
    paths = pool[1::2]
    assert run("pool", "destroy", *paths, stdin="n\n").returncode == 1
    assert Path(paths[0]).exists()
    assert run("pool", "destroy", *paths, "--yes").returncode == 0
    assert not any(Path(path).exists() for path in paths)


def test_destroying_part_of_a_pool_requires_force(run: Run, pool: list[str]) -> None:
    paths = pool[1::2]
    refused = run("pool", "destroy", paths[0], "--yes")
    assert refused.returncode == 1
    assert "has 2 devices, and 1 of them are not named" in refused.stderr
    assert all(Path(path).exists() for path in paths)
    assert run("pool", "destroy", paths[0], "--yes", "--force").returncode == 0
    assert [Path(path).exists() for path in paths] == [False, True]
    assert run("pool", "destroy", paths[1], "--yes", "--force").returncode == 0


def test_an_invalid_size_is_a_usage_error(run: Run, paths: list[str]) -> None:
    refused = run("pool", "create", *paths, "--size", "much")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "'much' is not a size" in refused.stderr


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
        commands.mount()
    with storing_default(paths):
        Pool.create(paths, device_size=8 << 20).close()
    for path in paths:
        Path(path).unlink()
    with pytest.raises(NoDefaultPoolError, match="of the mounted pool is missing: it was removed"):
        commands.mount()
