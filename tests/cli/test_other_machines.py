# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Commands on machines unlike the developers': older kernels, sandboxes that deny system calls or
hide /proc, and output that is not UTF-8.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.denied import CALLS
from support.emulation import long

import beluga.pool.runtime
from beluga import IndexServer, Pool
from beluga.errors import RuntimeDirError
from beluga.gateway.fleet import read_workers, workers_text
from beluga.text import decode_text

DENY = Path(__file__).resolve().parent.parent / "support/denied.py"
OLD = ["pidfd_open", "pidfd_send_signal", "io_uring_setup", "openat2", "close_range", "clone3"]


def ran(
    *arguments: object, deny: tuple[int, list[str]] | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    before = [] if deny is None else [sys.executable, DENY, str(deny[0]), ",".join(deny[1])]
    command = [*before, sys.executable, "-m", "beluga", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, timeout=120, check=False, env={**os.environ, **environment}
    )


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86-64")
@pytest.mark.parametrize(
    "deny",
    [
        (errno.ENOSYS, [*OLD, "populate", "statx", "getrandom", "memfd_create"]),
        pytest.param(
            (errno.EPERM, [*OLD[:3], "populate", "sched_setaffinity", "membarrier", "mbind"]),
            marks=pytest.mark.long,
        ),
        pytest.param((errno.EPERM, ["pidfd_send_signal"]), marks=pytest.mark.long),
        pytest.param((errno.EINVAL, ["populate", "hugepage"]), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_server_starts_serves_and_stops_without_newer_system_calls(
    shm: Path, tmp_path: Path, deny: tuple[int, list[str]]
) -> None:
    assert set(deny[1]) <= {*CALLS, "populate", "hugepage"}
    pool, value = ("--pool", shm / "a"), tmp_path / "value"
    value.write_bytes(os.urandom(100_000))
    assert ran("pool", "create", shm / "a", "--size", "16M", deny=deny).returncode == 0
    started = ran("serve", "--detach", "--disk", tmp_path, "--disk-bytes", "64M", *pool, deny=deny)
    assert started.returncode == 0, started.stderr
    try:
        assert ran("put", *pool, "key", value, deny=deny).returncode == 0
        assert ran("get", *pool, "key", deny=deny).stdout == value.read_bytes()
    finally:
        stopped = ran("stop", *pool, deny=deny)
    assert stopped.returncode == 0, stopped.stderr
    assert b"stopped" in stopped.stderr
    assert ran("ping", *pool).returncode == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86-64")
def test_large_buffers_need_no_huge_pages() -> None:
    code = "from beluga.tiers.arena import Arena; assert Arena(0).take(8 << 20).nbytes == 8 << 20"
    deny = [sys.executable, DENY, str(errno.EINVAL), "hugepage"]
    subprocess.run([*deny, sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.long
def test_every_command_prints_only_characters_of_the_outputs_encoding(shm: Path) -> None:
    pool = ("--pool", shm / "a")
    ran("pool", "create", shm / "a", "--size", "16M")
    ran("serve", "--detach", *pool)
    try:
        for encoding in ("ascii", "latin-1"):
            for command in (("top", "--once"), ("stat",)):
                shown = ran(*command, *pool, PYTHONIOENCODING=encoding)
                assert shown.returncode == 0, shown.stderr
                assert shown.stdout.isascii() or encoding == "latin-1"
    finally:
        ran("stop", *pool)


def test_json_stays_json_in_ascii(tmp_path: Path) -> None:
    file = tmp_path / "süß.toml"
    file.write_text('log_level = "info"\n')
    shown = ran("--config", file, "config", "--json", PYTHONIOENCODING="ascii")
    assert "süß.toml" in str(json.loads(shown.stdout.decode("ascii")))


@pytest.mark.parametrize("encoding", ["utf-8-sig", long("utf-16"), long("utf-32")])
def test_settings_files_may_begin_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    workers, settings = tmp_path / "workers", tmp_path / "beluga.toml"
    workers.write_bytes("http://127.0.0.1:19005\n".encode(encoding))
    engines = read_workers(workers_text(workers), workers)
    assert engines is not None
    assert [engine.url for engine in engines] == ["http://127.0.0.1:19005"]
    settings.write_bytes('log_level = "info"\n'.encode(encoding))
    shown = ran("--config", settings, "config", "--json")
    assert b"info" in shown.stdout, shown.stderr
    model = tmp_path / "config.json"
    fields = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "dtype": "float16"}
    model.write_bytes(json.dumps(fields).encode(encoding))
    assert ran("size", model, "--memory", "1G").returncode == 0
    assert decode_text("\ufeffx".encode()) == "x"


def test_a_hidden_boot_id_is_reported(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pool.create([shm / "a"], device_size=16 << 20) as pool:
        IndexServer(pool).stop()
        monkeypatch.setattr(beluga.pool.runtime, "_BOOT_ID", tmp_path / "boot_id")
        with pytest.raises(RuntimeDirError, match=r"boot_id cannot be read \(No such file"):
            pool.raise_for_status(-errno.ENOENT, "starting a server")
        (tmp_path / "boot_id").touch()
        with pytest.raises(RuntimeDirError, match=r"boot_id cannot be read \(it has no id"):
            pool.raise_for_status(-errno.EIO, "starting a server")
        (tmp_path / "boot_id").write_text("5b1bd1ee-1c2d-4e3f-9a0b-0123456789ab\n")
        with pytest.raises(OSError, match=f"{pool.runtime_dir}"):
            pool.raise_for_status(-errno.EIO, "starting a server")
