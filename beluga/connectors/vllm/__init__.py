# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM on the pool: a KV connector (``KVConnectorBase_V1``) for vLLM 0.32 and 0.33.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BelugaConnector",
        "kv_role": "kv_both"}'

The path of a block::

    scheduler process                        worker process, one per rank
    -----------------                        ----------------------------
    lookup: leading hits of all ranks'
    keys, one call, pinned        --Step-->  load: one get per request, where the blocks lie;
                                             before the forward, or a long one in a thread
    the output of a step that
    completed blocks is taken     --Step-->  save: queued; a low-priority thread puts them
    pins freed, events sent     <--Report--  loaded, stored

Files of the KV connector:

* ``connector`` implements vLLM's interface and only forwards calls; ``plugin`` registers it.
* ``settings``, ``identity`` (the namespace) and ``layout`` (where a block's bytes lie) are shared.
  ``parts`` names a rank's part of a block, and ``shards`` finds it in blocks of other engines.
* ``policy`` makes vLLM compute blocks that were not loaded, and requests AMX; ``load_timing``
  decides which loads it waits for.
* ``cachegroup`` has the groups of layers. ``blocks`` defines a block of a prefix: one block of
  the engine, or in a hybrid model parts in several groups, by vLLM's rules (``groups``).
* ``lookups`` and ``schedule`` are the scheduler's side, ``worker``, ``loads``,
  ``saves`` and ``staging`` the workers' side; ``steps`` has the messages between them.
* ``hints`` reads the hints in requests.
* ``events`` and ``stats`` are the reports.

``tier`` is apart from them: the pool as a tier of vLLM's own offloading.

Only ``connector``, ``groups``, ``stats``, ``plugin`` and ``tier`` import vLLM.

A block is saved only after the step that computes it, and every load that it depends on, are known
to have succeeded: on every rank, and for every other connector (see ``schedule``). This keeps wrong
KV out of the pool.
"""

from __future__ import annotations

from typing import Any

from beluga.connectors.vllm.counters import figures

__all__ = ["BelugaConnector", "figures"]


def __getattr__(name: str) -> Any:
    if name == "BelugaConnector":  # vLLM is imported only when the connector is accessed
        from beluga.connectors.vllm.connector import BelugaConnector

        return BelugaConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
