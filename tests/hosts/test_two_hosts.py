# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two virtual hosts on the devdax devices of one pool: this does once what scripts/two-hosts
does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run import SKIPPED

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every wait in it is bounded, with a clear line; this is for the rest
def test_two_hosts_share_a_pool_and_survive_each_other() -> None:
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("two hosts: 1 of 1 runs passed\n")
