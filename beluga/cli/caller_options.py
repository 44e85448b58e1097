# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options that decide which callers the gateway accepts."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from beluga.cli.frame import Option

AllowHost = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help=(
            "An additional name of this router in requests' Host headers; * accepts all. Repeat "
            "the option for each name."
        ),
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="A site whose pages may send forms without an API key, such as https://chat.example.",
    ),
]
AdminToken = Annotated[
    Path | None,
    Option(metavar="FILE", help=("A file with the token required on the operators' address.")),
]
Tls = Annotated[
    str,
    Option(metavar="CERTIFICATE,KEY", help="Use TLS on both addresses, with these PEM files."),
]


class CallerOptions(NamedTuple):
    """The values of the options: see ``beluga.gateway.Callers``."""

    allow_host: AllowHost = None
    allow_origin: AllowOrigin = None
    admin_token: AdminToken = None
    tls: Tls = ""


def with_callers(command: Callable[..., None]) -> Callable[..., None]:
    """Add these options to a command, which receives them as ``callers``."""
    hints = typing.get_type_hints(command, include_extras=True)
    added = typing.get_type_hints(CallerOptions, include_extras=True)
    parameters = [
        *(
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "callers"
        ),
        *(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=CallerOptions._field_defaults[name],
                annotation=hint,
            )
            for name, hint in added.items()
        ),
    ]

    @functools.wraps(command)
    def run(*arguments: Any, **values: Any) -> None:
        named = {name: values.pop(name) for name in added if name in values}
        command(*arguments, callers=CallerOptions(**named), **values)

    # inspect.signature() would follow __wrapped__ to the original parameters.
    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
