# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of commands that serve a pool with lower tiers."""

from __future__ import annotations

from typing import Annotated

from beluga.choices import ADMISSIONS, OFFLOADS
from beluga.cli.frame import BadParameter, Option
from beluga.cli.options import size

Disks = Annotated[
    list[str] | None,
    Option(
        "--disk",
        metavar="PATH",
        help=(
            "Offload blocks to this disk: a directory, a file or a block device. Repeat the "
            "option to spread them over several disks."
        ),
    ),
]
DiskBytes = Annotated[
    int,
    Option(parser=size, metavar="SIZE", help="The total size used on the disks, such as 800G."),
]
DiskOwner = Annotated[
    str,
    Option(
        metavar="NAME",
        help=(
            "The owner of the disks' blocks; a disk of another owner is refused. Default: the "
            "pool's location, so that a new pool there takes the disk over with its blocks."
        ),
    ),
]
Remotes = Annotated[
    list[str] | None,
    Option(
        "--remote",
        metavar="URL",
        help=(
            "Offload blocks to this store, which several pools may share: s3://BUCKET/PREFIX, "
            "file:///PATH, redis://HOST:PORT/DB or mooncake://HOST:PORT."
        ),
    ),
]
ForgetTier = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help=(
            "Drop the pending removals of a tier that will never be used below this pool again: "
            "disk (all but the server's own), or a store's URL. Repeat the option for each."
        ),
    ),
]
Offload = Annotated[
    str,
    Option(
        words=OFFLOADS,
        help=(
            "What to do with a block that would be evicted before it was offered to these tiers: "
            "drop it, or wait."
        ),
    ),
]
AdmissionName = Annotated[
    str,
    Option(
        "--admission",
        words=ADMISSIONS,
        metavar="NAME",
        help="Which blocks the tiers save: always, second-touch, sketch or adaptive.",
    ),
]


def refuse_without_tier(offload: str, admission: str, *, usual: tuple[str, str]) -> None:
    """Raise BadParameter for options of lower tiers without a tier. ``usual`` has their
    defaults.
    """
    for name, value, default in zip(
        ("--offload", "--admission"), (offload, admission), usual, strict=True
    ):
        if value != default:
            raise BadParameter(f"{name} {value} needs a lower tier; give --disk or --remote")
