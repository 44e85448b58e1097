# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptance test of a pool's memory (``csrc/verify/``): does it behave as the protocol needs?

:func:`verify_pool` runs it on an idle pool, with both sides on one host or as one side of two. It
returns a :class:`VerifyReport` that an operator can file.
"""

from beluga.verify.report import MachineRecord, VerifyReport, VerifyResult
from beluga.verify.run import verify_pool

__all__ = ["MachineRecord", "VerifyReport", "VerifyResult", "verify_pool"]
