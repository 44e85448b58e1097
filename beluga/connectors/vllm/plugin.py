# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The plugin that registers ``"kv_connector": "BelugaConnector"`` with every vLLM of its
environment.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``.
"""

from __future__ import annotations

from beluga.connectors.vllm.media import mark_contents

NAME = "BelugaConnector"


def register() -> None:
    """Register the connector by its name, and mark names of media that were made of contents. A
    second call does nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "beluga.connectors.vllm.connector", NAME)
    mark_contents()
