# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The peers: pools of other projects under the same engines, and how to run each next to ours.

They have their own environment, which ``scripts/dev/setup-peers`` makes and which also contains
vLLM's packages. ``BELUGA_PEERS_PYTHON`` names its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..arm import Arm, Setting
from .environment import PeerUnavailableError
from .lmcache import lmcache_arm
from .mooncake import mooncake_arm

PEERS: dict[str, Callable[[Setting], AbstractContextManager[Arm]]] = {
    "lmcache": lmcache_arm,
    "mooncake": mooncake_arm,
}

__all__ = ["PEERS", "PeerUnavailableError"]
