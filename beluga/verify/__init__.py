# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An acceptance test of a pool's memory (``csrc/verify/``): does it do what the rules need?

:func:`verify_pool` runs it on an idle pool, alone on one host or as one side of two, and returns a
:class:`Report` to be filed.
"""

from beluga.verify.report import Finding, Machine, Report
from beluga.verify.run import verify_pool

__all__ = ["Finding", "Machine", "Report", "verify_pool"]
