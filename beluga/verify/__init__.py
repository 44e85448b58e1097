# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptance test of a pool's memory (``csrc/verify/``): it checks the properties that the
protocol needs.

:func:`verify_pool` runs it on an idle pool, with both sides on one host or as one side of two. It
returns a :class:`VerifyReport`, which an operator can archive.
"""

from beluga.verify.run import MachineRecord, VerifyReport, VerifyResult, verify_pool

__all__ = ["MachineRecord", "VerifyReport", "VerifyResult", "verify_pool"]
