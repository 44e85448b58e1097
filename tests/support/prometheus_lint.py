# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks the names of metrics with Prometheus's promtool. Debian's package prometheus has it, and
is installed if the tests run as root. Otherwise the test is skipped.
"""

import shutil
import subprocess

import pytest
from support.shown import ROOT


def complaints(text: bytes) -> list[str]:
    """Return the errors of ``promtool check metrics`` for a page of metrics. The test fails if the
    page cannot be read.
    """
    installer = ROOT / "scripts" / "dev/setup-packages"
    if not shutil.which("promtool"):
        subprocess.run([installer, "prometheus"], check=False)
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool, and it cannot be installed here")
    requested = [promtool, "check", "metrics"]
    run = subprocess.run(requested, input=text, capture_output=True, check=False)
    assert run.returncode in (0, 3), run.stderr.decode()  # 3: the page was read, and has errors
    return run.stderr.decode().splitlines()
