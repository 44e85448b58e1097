# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the connector adjusts in vLLM's processes: the policy for failed loads, and AMX."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICY = "recompute"


def recompute_failed_loads(vllm_config: Any) -> bool:
    """Set the policy in a connector's configuration and in those that it was copied from. Call this
    from the constructor. Returns whether the connector is inside another one.

    vLLM's default fails the request. Its scheduler reads the policy right after it has made its
    connector, from the engine's configuration. A connector inside ``MultiConnector`` gets a copy of
    that, with a transfer configuration of its own, and no interface leads from there to the
    original. But the original is an argument of the functions that construct the connector, so it
    is found on the stack.
    """
    transfers = {id(transfer): transfer for transfer in _transfers(vllm_config)}
    for transfer in transfers.values():
        transfer.kv_load_failure_policy = POLICY
    return len(transfers) > 1


def _transfers(vllm_config: Any) -> Iterator[Any]:
    """Yield the transfer configuration, and those of the calling functions' configurations."""
    yield vllm_config.kv_transfer_config
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        for value in frame.f_locals.values():
            if isinstance(value, type(vllm_config)):
                transfer = getattr(value, "kv_transfer_config", None)
                if transfer is not None:
                    yield transfer


def permit_amx(device: str) -> None:
    """Request tiles if the engine computes on a CPU. Harmless without tiles, or when repeated.

    Linux grants AMX tiles only to processes that request them. vLLM's attention for CPUs uses tiles
    in bfloat16 but does not request them. A matrix product before it usually does, unless the model
    is small and only one token is computed. So a process whose first forward follows a pool hit
    would die of an illegal instruction.
    """
    import torch

    init = getattr(torch.cpu, "_init_amx", None)
    if device == "cpu" and init is not None:
        init()
