# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``cxl-rpc``, by name."""

from __future__ import annotations

from beluga.cli import lazy, program

COMMANDS: lazy.Places = {
    "ping": "ping:ping",
    "bench": "bench:rpc",
    "serve": "lanes:serve_lanes",
    "call": "lanes:call",
    "list": "lanes:list_handlers",
}

app = lazy.program("Make calls over shared memory: a server, a client, and a benchmark.", COMMANDS)
app.callback()(program.of("cxl-rpc"))

if __name__ == "__main__":  # started by --detach
    from beluga.cli.main import cxl_rpc

    cxl_rpc()
