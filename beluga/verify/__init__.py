# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptance test of a pool's memory (``csrc/verify/``): does it behave as the protocol needs?

:func:`verify_pool` runs it on an idle pool, with both sides on one host or as one side of two. It
returns a :class:`Report` that an operator can file.
"""

from beluga.verify.report import Finding, Machine, Report
from beluga.verify.run import verify_pool

__all__ = ["Finding", "Machine", "Report", "verify_pool"]
