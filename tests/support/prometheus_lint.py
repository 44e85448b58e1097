# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks the names of metrics with Prometheus's promtool. Debian's package prometheus has it, and
is installed if the tests run as root. Otherwise the test is skipped.
"""

import subprocess

from support.packages import program


def complaints(text: bytes) -> list[str]:
    """Return the errors of ``promtool check metrics`` for a page of metrics. The test fails if the
    page cannot be read.
    """
    requested = [program("promtool", "prometheus"), "check", "metrics"]
    run = subprocess.run(requested, input=text, capture_output=True, check=False)
    assert run.returncode in (0, 3), run.stderr.decode()  # 3: the page was read, and has errors
    return run.stderr.decode().splitlines()
