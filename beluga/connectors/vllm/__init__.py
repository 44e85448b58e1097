# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM on the pool: a KV connector (``KVConnectorBase_V1``) for vLLM 0.32 and 0.33.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BelugaConnector",
        "kv_role": "kv_both"}'

How a block travels::

    scheduler process                        worker process, one per rank
    -----------------                        ----------------------------
    lookup: leading hits of all ranks'
    keys, one call, pinned        --Step-->  load: one get per request, before the forward
                                             (or in a thread of its own, load=async)
    a step completes blocks       --Step-->  save: queued; a low-priority thread puts them
    pins go, events go out      <--Report--  loaded, stored

Files: ``settings`` what a user may say; ``identity`` whose blocks these are (the namespace);
``layout`` where a block's bytes lie in the engine's tensors; ``steps`` what the two sides tell each
other; ``lookups`` and ``schedule`` the scheduler's side; ``loads``, ``saves``, ``staging`` and
``worker`` the worker's; ``events``, ``stats`` what is seen from outside; ``connector`` vLLM's
interface, and nothing else; ``plugin`` makes the connector known by name; ``amx`` asks for the
processor's tiles. The other way, behind vLLM's OffloadingConnector: ``offloading``; ``manager`` and
its ``answers`` are the scheduler's side, ``jobs`` the worker's, and ``meeting`` (an ``errand`` on
each side) brings them together. Only ``connector``, ``stats``, ``plugin``, ``offloading`` and
``manager`` import vLLM.

What keeps garbage out of the pool: a block is saved only when the step that computes it loads
nothing, or its loads are known to have succeeded on every rank (see ``schedule``).
"""

from __future__ import annotations

from typing import Any

from beluga.connectors.vllm.counters import figures

__all__ = ["BelugaConnector", "figures"]


def __getattr__(name: str) -> Any:
    if name == "BelugaConnector":  # vLLM is imported only when vLLM asks
        from beluga.connectors.vllm.connector import BelugaConnector

        return BelugaConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
