# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of commands that serve a pool with tiers below it."""

from __future__ import annotations

from typing import Annotated

import typer

from beluga.cli.options import among, one_of, size
from beluga.tiers import ADMISSIONS, OFFLOADS

Disks = Annotated[
    list[str] | None,
    typer.Option(
        "--disk",
        metavar="PATH",
        help="Let blocks sink to this disk: a directory, a file or a block device. Repeat the "
        "option to spread them over several disks.",
    ),
]
DiskBytes = Annotated[
    int,
    typer.Option(
        parser=size, metavar="SIZE", help="How much of the disks is used, in all, such as 800G."
    ),
]
DiskOwner = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose blocks the disks have; a disk of another owner is refused. Without a name it "
        "is the place of the pool, so that a new pool there gets the disk with its blocks.",
    ),
]
Remotes = Annotated[
    list[str] | None,
    typer.Option(
        "--remote",
        metavar="URL",
        help="Let blocks sink to this store, which several pools may share: s3://BUCKET/PREFIX, "
        "file:///PATH, redis://HOST:PORT/DB or mooncake://HOST:PORT.",
    ),
]
ForgetTier = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Let the pool forget the removals of a tier that it had and will never have again: "
        "disk, or a store's URL. Repeat the option for each.",
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        parser=one_of(*OFFLOADS),
        autocompletion=among(*OFFLOADS),
        metavar="|".join(OFFLOADS),
        help="What becomes of a block that would be evicted from the pool before it was offered to "
        "these tiers: drop it, or wait.",
    ),
]
AdmissionName = Annotated[
    str,
    typer.Option(
        "--admission",
        parser=one_of(*ADMISSIONS),
        autocompletion=among(*ADMISSIONS),
        metavar="NAME",
        help="Which blocks the tiers save: always, second-touch, sketch or adaptive.",
    ),
]


def refuse_without_tier(offload: str, admission: str, *, usual: tuple[str, str]) -> None:
    """Raise BadParameter for options of lower tiers without a tier. ``usual`` has the default
    values.
    """
    for name, value, default in zip(
        ("--offload", "--admission"), (offload, admission), usual, strict=True
    ):
        if value != default:
            raise typer.BadParameter(
                f"{name} {value} is about lower tiers; give --disk or --remote"
            )
