# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The DSA engine: Intel's Data Streaming Accelerator, the queues that lead to it, and sysfs."""

from beluga.transfer.engines.dsa.engine import DsaEngine

__all__ = ["DsaEngine"]
