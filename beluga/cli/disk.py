# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga disk``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from beluga.cli.frame import Argument
from beluga.cli.options import Json
from beluga.cli.output import plain, print_json, print_note

Disk = Annotated[
    list[Path],
    Argument(metavar="PATH...", help="The disks, as in --disk of a server."),
]


def adopt(path: Disk, json: Json = False) -> None:
    """Release disks with blocks of another server to the next server that opens them.

    Use this for a disk whose server will not return. Its blocks stay. A new pool at the location of
    an earlier one needs no such command.
    """
    from beluga.tiers import adopt_disk

    for each in path:
        before = adopt_disk(each)
        if json:
            print_json({"disk": str(each), "server": before.name, "pool": before.pool})
        else:
            owner = plain(before.name or before.pool) or "no pool"
            print_note(f"{each} belonged to {owner}; the next server that opens it takes it over")
