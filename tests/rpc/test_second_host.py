# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool with a device of hardware coherence, one host's own memory, refuses every other host. A
host with another boot id is another host; one with another number is reported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from other_machine import OtherMachine
from support.emulation import PATIENCE, long

from beluga._ffi import lib
from beluga.errors import SecondHostError
from beluga.pool import Pool
from beluga.rpc import Client, Server

BOOT_ID = "/proc/sys/kernel/random/boot_id"
MOUNT = f'mount --bind "$0" {BOOT_ID} && mount -t tmpfs none "$1" && shift && exec "$@"'
AS_ANOTHER = ("unshare", "--mount", "sh", "-c", MOUNT)
OURS = pytest.mark.parametrize(
    "coherence", [long("hardware"), ["software", "hardware"]], indirect=True, ids=str
)


@OURS
def test_a_client_of_another_machine_is_refused_by_the_server(pool: Pool) -> None:
    with Server(pool) as server:
        other = OtherMachine(pool, host=0, boot_id=(1, 2))
        assert other.attach(nonce=77) == -lib.BL_ERROR_SECOND_HOST
        other = OtherMachine(pool, host=5, boot_id=(1, 2))
        assert other.attach(nonce=78) == -lib.BL_ERROR_SECOND_HOST
        assert server.stat().attach_count == 0


@OURS
def test_a_client_under_another_host_number_is_refused(pool: Pool) -> None:
    with Server(pool, host=2), pytest.raises(SecondHostError, match="software"):
        Client(pool, host=1)
    with Server(pool, host=2), Client(pool, host=2) as client:
        client.ping()


@pytest.mark.parametrize("coherence", ["software"], indirect=True)
def test_a_pool_with_software_coherence_may_have_many_hosts(pool: Pool) -> None:
    with Server(pool, host=2), Client(pool, host=1) as first, Client(pool, host=2) as second:
        first.ping()
        second.ping()
        assert OtherMachine(pool, host=5, boot_id=(1, 2)).attach(nonce=78) == 0


class AnotherMachine:
    """Runs commands with another boot id and without the pool's lock files."""

    def __init__(self, pool: Pool, tmp_path: Path) -> None:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
        self._as_another = [*AS_ANOTHER, str(boot_id), str(pool.runtime_dir)]
        self._pool = [word for device in pool.devices for word in ("--pool", str(device.path))]

    def possible(self) -> bool:
        try:
            return self._run("true").returncode == 0
        except OSError:
            return False

    def beluga(self, *words: str) -> tuple[int, str]:
        """Run the command. Returns its exit status and its last line."""
        ended = self._run(sys.executable, "-m", "beluga.cli.main", *words, *self._pool)
        return ended.returncode, (ended.stderr.splitlines() or [""])[-1]

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._as_another, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120 * PATIENCE,
        )


@OURS
def test_commands_of_another_machine_are_refused(pool: Pool, tmp_path: Path) -> None:
    another = AnotherMachine(pool, tmp_path)
    if not another.possible():
        pytest.skip("this user cannot mount another boot id (unshare --mount)")
    with Server(pool):
        requested = (("ping", "--timeout", "1"), ("ping", "--host", "1"), ("serve",))
        for words in (*requested, ("serve", "--host", "1")):
            status, line = another.beluga(*words)
            assert (status, "another host has this pool" in line) == (1, True), line
