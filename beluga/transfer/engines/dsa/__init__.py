# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The DSA engine (``csrc/dsa/``): Intel's Data Streaming Accelerator, the queues that lead to it,
and sysfs.
"""

from beluga.transfer.engines.dsa.engine import COSTS, DsaEngine, queue_of
from beluga.transfer.engines.dsa.sysfs import why_no_queue

__all__ = ["COSTS", "DsaEngine", "queue_of", "why_no_queue"]
