# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An upgrade by ``docs/operate/day-two.md``, from a pool and a disk tier that the former
release made.

``former/`` has both, as commit d46afb8 left them after a put, ``beluga drain`` and SIGTERM. When a
release changes a format, create them again with the release before it.
"""

from __future__ import annotations

import gzip
import subprocess
from collections.abc import Callable
from pathlib import Path

FORMER = Path(__file__).with_name("former")
STORED = "what the former release stored\n" * 400

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_pool_of_an_earlier_format_is_rejected_and_its_disk_tier_adopted(
    run: Run, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    devices = [tmp_path / "a", tmp_path / "b"]
    for device in devices:
        device.write_bytes(gzip.decompress((FORMER / f"{device.name}.gz").read_bytes()))
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "blocks").write_bytes(gzip.decompress((FORMER / "disk-blocks.gz").read_bytes()))
    pool = [word for device in devices for word in ("--pool", str(device))]

    # Every command rejects the pool, and prints the remedy.
    before = [device.read_bytes() for device in devices]
    for words in (("serve", *pool), ("stat", *pool), ("pool", "info", *pool)):
        refused = run(*words)
        assert refused.returncode == 1
        assert "beluga pool create --force" in refused.stderr
        assert refused.stderr.count("beluga: error:") == 1
    assert [device.read_bytes() for device in devices] == before

    # A new pool has no blocks, and the disk belongs to another server until it is adopted.
    ended = run("pool", "create", "--force", "--size", "24M", *map(str, devices))
    assert ended.returncode == 0, ended.stderr
    tier = ("--disk", str(disk), "--disk-bytes", "16M")
    refused = run("serve", *pool, *tier)
    assert refused.returncode == 1
    assert f"beluga disk adopt {disk / 'blocks'}" in refused.stderr.replace("\n", " ")
    assert run("disk", "adopt", str(disk / "blocks")).returncode == 0
    server = start("serve", *pool, *tier)
    assert server.stderr
    assert "now belongs to the server" in server.stderr.readline()
    assert server.stderr.readline().startswith("serving, epoch 1")
    assert run("get", "key", *pool).stdout == STORED
