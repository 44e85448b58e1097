# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CPU engine (``csrc/transfer/cpu.c``): threads that copy by streaming stores, with tuning."""

from beluga.transfer.engines.cpu.engine import COSTS, CpuEngine, default_threads
from beluga.transfer.engines.cpu.tuning import CopySettings, tuned

__all__ = ["COSTS", "CopySettings", "CpuEngine", "default_threads", "tuned"]
