# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``cxl-rpc`` as a module, which ``cxl-rpc serve --detach`` starts."""

from __future__ import annotations

from beluga.cli.main import cxl_rpc

if __name__ == "__main__":
    cxl_rpc()
