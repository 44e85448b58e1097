# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two virtual hosts on the devdax devices of one pool: one run of scripts/two-hosts."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import agent
import pytest
from run import SKIPPED

RUN = Path(__file__).with_name("run.py")


def test_guests_import_modules_that_exist() -> None:
    """Otherwise a guest's agent ends, which shows only as a kernel's panic."""
    assert [name for name in agent.IMPORTED if find_spec(name) is None] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # timeout of the whole run; each wait in it has its own
def test_two_hosts_share_a_pool_and_survive_each_other() -> None:
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("two hosts: 1 of 1 runs passed\n")
