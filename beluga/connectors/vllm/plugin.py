# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes ``"kv_connector": "BelugaConnector"`` known to every vLLM in whose environment this is.

The entry point ``vllm.general_plugins`` calls :func:`register` in each of vLLM's processes.
"""

from __future__ import annotations

NAME = "BelugaConnector"


def register() -> None:
    """Register the connector by its name; twice is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "beluga.connectors.vllm.connector", NAME)
