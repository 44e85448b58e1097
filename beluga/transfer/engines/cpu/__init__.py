# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CPU engine: threads that copy with streaming stores, and their tuning."""

from beluga.transfer.engines.cpu.engine import COSTS, CpuEngine, default_threads
from beluga.transfer.engines.cpu.tuning import CopySettings, tuned

__all__ = ["COSTS", "CopySettings", "CpuEngine", "default_threads", "tuned"]
