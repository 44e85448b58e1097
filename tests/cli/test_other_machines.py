# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Commands on machines unlike the developers': older kernels, sandboxes that deny system calls or
hide /proc, output that is not UTF-8, and folders with packages of any name, none of which is
imported.
"""

import errno
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import captured
from support.denied import CALLS
from support.emulation import long

import beluga.pool.runtime
from beluga import IndexServer, Pool
from beluga.errors import RuntimeDirError
from beluga.gateway.fleet import read_workers, workers_text
from beluga.replay import Conversations, make_workload
from beluga.replay.trace import write_trace
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


# ---- Nothing is imported from the folder where a command starts


ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("beluga", "beluga_bench", "numpy", "click", "msgspec", "rich", "cffi", "aiohttp")
STANDARD = ("json", "struct", "random", "runpy", "queue", "copy")
TRAP = "open({mark!r}, 'a').write(__name__ + ' '); raise SystemExit('imported from ' + __file__)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a package of every name that a command might import."""
    hostile = tmp_path / "hostile"
    for name in (*PACKAGES, *STANDARD):
        (hostile / name).mkdir(parents=True)
        (hostile / name / "__init__.py").write_text(TRAP.format(mark=str(hostile / "imported")))
    write_trace(make_workload(Conversations(conversation_count=5)), hostile / "trace")
    return hostile


def check(folder: Path, *words: str | Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200"}
    ended = captured(list(map(str, words)), cwd=folder, env=environment)
    mark = folder / "imported"
    assert not mark.exists(), f"imported from the current folder: {mark.read_text()}"
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "beluga --help",
        "beluga replay trace --json",
        "beluga bench rpc --smoke --coherence hardware",
        "cxl-rpc bench --smoke --coherence hardware",
        pytest.param("beluga bench scheduler --smoke", marks=pytest.mark.slow),
        pytest.param("beluga bench gateway --smoke", marks=pytest.mark.slow),
    ],
)
def test_a_command_imports_nothing_from_there(folder: Path, words: str) -> None:
    name, *arguments = words.split()
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed beside {sys.executable}")
    check(folder, BIN / name, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["demo", "demo-gpu"])
def test_a_demo_imports_nothing_from_there(folder: Path, script: str) -> None:
    check(folder, ROOT / "scripts" / script, "--json")


def test_programs_are_started_by_child_py_alone() -> None:
    """``python -m`` and ``python -c`` look into the current folder first."""
    sources = [path for name in ("beluga", "bench") for path in (ROOT / name).rglob("*.py")]
    scripts = [
        path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    wrong = [path for path in sources if re.search(r'"-[mc]", ', path.read_text())]
    wrong += [path for path in scripts if "-m beluga" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in wrong] == []
