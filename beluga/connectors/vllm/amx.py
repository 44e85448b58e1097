# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests AMX tiles, which Linux grants only to processes that request them.

vLLM's attention for CPUs uses tiles in bfloat16 but does not request them. A matrix product before
it usually does, unless the model is small and only one token is computed. So a process whose first
forward follows a pool hit would die of an illegal instruction.
"""

from __future__ import annotations


def permit(device: str) -> None:
    """Request tiles if the engine computes on a CPU. Harmless without tiles, or when repeated."""
    import torch

    init = getattr(torch.cpu, "_init_amx", None)
    if device == "cpu" and init is not None:
        init()
