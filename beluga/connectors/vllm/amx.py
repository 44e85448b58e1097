# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Leave for this process to use the processor's tiles (AMX), which Linux gives to who asks.

vLLM's attention for CPUs uses them in bfloat16 and does not ask: a matrix product before it has
done so, unless the model is small and there is but one token to compute. A process whose first
forward is that of a pool hit would die of an illegal instruction.
"""

from __future__ import annotations


def permit(device: str) -> None:
    """Ask, if the engine computes on a CPU. Asking where there are none, or again, does no harm."""
    import torch

    init = getattr(torch.cpu, "_init_amx", None)
    if device == "cpu" and init is not None:
        init()
