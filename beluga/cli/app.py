# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga``, by name."""

from __future__ import annotations

from beluga.cli import lazy, program

COMMANDS: lazy.Places = {
    "mount": "pool:mount",
    "umount": "pool:umount",
    "serve": "serve:serve",
    "stop": "detach:stop",
    "ping": "ping:ping",
    "stat": "stat:stat",
    "trace": "trace:trace",
    "quota": "operate:quota",
    "drain": "operate:drain",
    "top": "top:top",
    "dashboard": "dashboard:dashboard",
    "put": "block:put",
    "get": "block:get",
    "explain": "look:explain_keys",
    "ls": "look:ls",
    "rm": "look:rm",
    "prefill-worker": "prefill_worker:prefill_worker",
    "replay": "replay:replay",
    "gateway": "gateway:gateway",
    "simulate": "simulate:simulate",
    "size": "size:size_tiers",
    "verify": "verify:verify",
    "doctor": "doctor:doctor",
    "config": "show_settings:show_settings",
    "bench": "bench:bench",
    "disk": lazy.Inner(
        "Give disks below a pool to another server.",
        {"adopt": "disk:adopt"},
    ),
    "pool": lazy.Inner(
        "Create, show, check and destroy pools.",
        {
            "create": "pool:create",
            "info": "pool:info",
            "check": "pool:check",
            "destroy": "pool:destroy",
        },
    ),
}

app = lazy.program(
    "A shared KV-cache pool for LLM inference on CXL memory, or on the memory you have.", COMMANDS
)
app.callback()(program.of("beluga"))
