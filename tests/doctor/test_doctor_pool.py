# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The checks of one pool: real pools in files, real servers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_machine import MIB, finding, made

from beluga.doctor import Finding, Machine, PoolLook
from beluga.doctor.checks import CHECKS
from beluga.doctor.machine import PoolInspection
from beluga.errors import (
    BootIdError,
    CallTimeoutError,
    HostClashError,
    RuntimeDirError,
    SecondHostError,
)
from beluga.pool import Pool
from beluga.rpc import Client, Server
from tests.rpc.other_machine import OtherMachine

NAMES = [check.name for check in CHECKS if check.name.startswith("pool-")]
LANES = 4


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    Pool.create(paths, device_size=8 * MIB, sparse=True, lane_count=LANES).close()
    return paths


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A place for a made-up machine."""
    yield tmp_path / "root"


def look(*paths: Path, host: int | None = None) -> dict[str, Finding]:
    machine = Machine(pool=PoolLook(paths, host=host))
    return {name: finding(name, machine) for name in NAMES}


def levels(findings: dict[str, Finding]) -> list[str]:
    return [findings[name].level for name in NAMES]


def changed(paths: list[Path], **facts: Any) -> Machine:
    """Return a machine that inspects the pool, with other facts."""
    look = PoolLook(tuple(paths))
    assert isinstance(look.facts, PoolInspection)
    vars(look)["facts"] = replace(look.facts, **facts)  # the property is cached there
    return Machine(pool=look)


def test_without_a_pool_every_pool_check_passes() -> None:
    assert levels(look()) == ["ok"] * len(NAMES)


def test_a_pool_without_a_server_raises_an_error_with_a_fix(paths: list[Path]) -> None:
    findings = look(*paths)
    assert levels(findings) == ["ok", "ok", "ok", "warning", "ok"]
    assert findings["pool-server"].fix == f"beluga serve --pool {paths[0]} --pool {paths[1]}"
    assert not paths[0].with_name("a.run").exists(), "it is made by those who use the pool"


def test_a_ping_of_the_server_releases_its_lane(paths: list[Path]) -> None:
    with Pool.open(paths) as pool, Server(pool) as server:
        for _ in range(2 * LANES):
            findings = look(*paths)
        assert levels(findings) == ["ok"] * len(NAMES)
        assert findings["pool-server"].text == "a server answers, epoch 1"
        assert server.stat().live_count == 0


def test_taken_lanes_are_reported(paths: list[Path]) -> None:
    with Pool.open(paths) as pool, Server(pool):
        clients = [Client(pool) for _ in range(LANES)]
        result = look(*paths)["pool-server"]
        for client in clients:
            client.close()
    assert result.level == "warning"
    assert f"all {LANES} lanes are taken" in result.text
    assert f"--lanes {2 * LANES} {paths[0]} {paths[1]}" in result.fix


def test_a_missing_device_is_an_error(paths: list[Path]) -> None:
    paths[1].unlink()
    findings = look(*paths)
    assert levels(findings) == ["error", "warning", "warning", "warning", "warning"]
    assert findings["pool-devices"].fix == f"beluga pool create {paths[0]} {paths[1]}"


def test_a_device_missing_from_the_list_is_an_error(paths: list[Path]) -> None:
    findings = look(paths[1])
    assert findings["pool-superblocks"].level == "error"
    assert "device-missing 0: of 2" in findings["pool-superblocks"].text
    assert "name every device" in findings["pool-superblocks"].fix


@pytest.mark.parametrize(
    ("offset", "kind"), [(8, "superblock-version"), (100, "superblock-damaged")]
)
def test_a_foreign_superblock_is_an_error(paths: list[Path], offset: int, kind: str) -> None:
    with paths[1].open("r+b") as file:
        file.seek(offset)
        file.write(b"\x63\x00")
    result = look(*paths)["pool-superblocks"]
    assert (result.level, kind in result.text) == ("error", True)
    assert result.fix == f"beluga pool create --force {paths[0]} {paths[1]}"


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("/dev/null", "--pool PATH"),
        ("/nowhere/pool", "mkdir -p /nowhere && beluga pool create /nowhere/pool"),
        ("/tmp@1M+5M", "2 MiB"),
        ("", "PATH"),
        ("/dev/dax77.0", "daxctl list -u"),
    ],
)
def test_an_unusable_path_is_an_error(path: str, fix: str) -> None:
    result = finding("pool-devices", Machine(pool=PoolLook((path,))))
    assert (result.level, fix in result.fix) == ("error", True)


def test_a_device_that_may_not_be_written_is_an_error(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    result = look(*paths)["pool-devices"]
    assert (result.level, "sudo setfacl -m u:" in result.fix) == ("error", True)


@pytest.mark.parametrize(
    ("failure", "levels_of", "fix"),
    [
        (HostClashError("host number 0 is another machine's"), ("warning", "error"), ""),
        (SecondHostError("another host uses it"), ("warning", "error"), ""),
        (CallTimeoutError("no answer"), ("error", "warning"), ""),
        (RuntimeDirError("another runtime directory"), ("error", "warning"), ""),
        # not another directory
        (BootIdError("it is hidden"), ("error", "warning"), "show /proc/sys/kernel/random"),
        (OSError(12, "Cannot allocate memory"), ("warning", "warning"), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_reason_of_a_missing_session_is_reported(
    paths: list[Path], failure: Exception, levels_of: tuple[str, str], fix: str
) -> None:
    machine = changed(paths, failure=failure)
    results = [finding(name, machine) for name in ("pool-server", "pool-host")]
    assert tuple(each.level for each in results) == levels_of
    assert all(each.fix and each.fix.startswith(fix) for each in results)


def test_another_machine_with_this_hosts_number_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.doctor.machine._WAIT_S", 0.2)
    path = tmp_path / "shared"
    created = Pool.create([path], device_size=8 * MIB, sparse=True, coherence="software")
    with created as pool, Server(pool):
        assert OtherMachine(pool, host=0, boot_id=(1, 2)).attach(nonce=77) == 0
        result = look(path)["pool-host"]
        assert (result.level, "--host N" in result.fix) == ("error", True), result
        assert (
            look(path, host=1)["pool-host"].text
            == "this machine is registered at the server as host 1"
        )


def test_a_host_number_out_of_range_is_reported(paths: list[Path]) -> None:
    with Pool.open(paths) as pool, Server(pool):
        assert "from 0 to 63" in look(*paths, host=64)["pool-host"].text


def test_hardware_coherence_on_devdax_is_a_warning(paths: list[Path]) -> None:
    facts = PoolLook(tuple(paths)).facts
    assert isinstance(facts, PoolInspection)
    devices = (replace(facts.devices[0], kind="devdax"), facts.devices[1])
    result = finding("pool-coherence", changed(paths, devices=devices))
    assert (result.level, "--coherence software" in result.fix) == ("warning", True)


def test_a_sparse_pool_that_cannot_grow_is_an_error(tmp_path: Path) -> None:
    device = tmp_path / "dev/shm/pool"
    device.parent.mkdir(parents=True)
    Pool.create([device], device_size=64 * MIB, sparse=True).close()
    pool = PoolLook((device,))
    small = made(tmp_path, pool=pool, usage=lambda _: (1 << 40, 10 * MIB))
    assert "SIGBUS" in finding("shm-space", small).text
    assert finding("shm-space", small).level == "error"
    assert finding("shm-space", made(tmp_path, usage=lambda _: (1 << 40, 10 * MIB))).level == "ok"
    group = "sys/fs/cgroup/engine"
    changes = {
        "proc/self/cgroup": "0::/engine\n",
        f"{group}/memory.max": f"{20 * MIB}\n",
        f"{group}/memory.current": "0\n",
    }
    assert finding("cgroup-memory", made(tmp_path, changes, pool=pool)).level == "error"


def test_the_files_that_a_servers_clients_need_are_counted(root: Path, paths: list[Path]) -> None:
    limited = made(root, pool=PoolLook(tuple(paths)), limit=lambda kind: 256 + 2 * LANES - 1)
    assert f"with {LANES} clients" in finding("open-files", limited).text
    enough = made(root, pool=PoolLook(tuple(paths)), limit=lambda kind: 256 + 2 * LANES)
    assert finding("open-files", enough).level == "ok"


class TestDefaultPool:
    """The pool that is examined by default."""

    @pytest.fixture(autouse=True)
    def record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        """Write the record of the mounted pool."""
        monkeypatch.delenv("BELUGA_POOL", raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr("beluga.pool.runtime.emulated_paths", lambda: ["/nowhere/0"])

        def record(text: str) -> None:
            (tmp_path / "state/beluga").mkdir(parents=True)
            (tmp_path / "state/beluga/default.json").write_text(text)

        return record

    def test_the_default_pool_is_none_at_first(self) -> None:
        look = PoolLook.named(None, None)
        assert (look.paths, look.failure) == ((), None)

    def test_the_default_pool_is_the_mounted_one(
        self, record: Callable[[str], None], paths: list[Path]
    ) -> None:
        record(json.dumps({"devices": [str(paths[0])]}))
        assert PoolLook.named(None, 3).paths == (str(paths[0]),)
        assert PoolLook.named([str(paths[1])], None).paths == (str(paths[1]),)

    def test_a_missing_device_is_an_error_with_its_remedy(
        self, record: Callable[[str], None], paths: list[Path]
    ) -> None:
        record(json.dumps({"devices": [str(path) for path in paths]}))
        paths[0].unlink()
        result = finding("pool-devices", Machine(pool=PoolLook.named(None, None)))
        assert (result.level, "is missing" in result.text) == ("error", True)
        assert result.fix == f"beluga mount --create {paths[0]} {paths[1]}"

    def test_a_damaged_record_is_an_error_with_its_remedy(
        self, record: Callable[[str], None]
    ) -> None:
        record("{")
        machine = Machine(pool=PoolLook.named(None, None))
        findings = {name: finding(name, machine) for name in NAMES}
        assert levels(findings) == ["error", "warning", "warning", "warning", "warning"]
        assert findings["pool-devices"].fix == "beluga umount"

    def test_an_invalid_default_pool_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BELUGA_POOL", "/dev/shm/a@3+4")
        result = finding("pool-devices", Machine(pool=PoolLook.named(None, None)))
        assert (result.level, result.fix) == ("error", "unset BELUGA_POOL")
