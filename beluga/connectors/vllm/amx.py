# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The request for AMX tiles, which Linux grants only to processes that ask.

vLLM's attention for CPUs uses tiles in bfloat16 but does not ask for them. A matrix product before
it usually asks, unless the model is small and only one token is computed. A process whose first
forward follows a pool hit would then die of an illegal instruction.
"""

from __future__ import annotations


def permit(device: str) -> None:
    """Ask for tiles if the engine computes on a CPU. It is harmless without tiles, or a second
    time.
    """
    import torch

    init = getattr(torch.cpu, "_init_amx", None)
    if device == "cpu" and init is not None:
        init()
