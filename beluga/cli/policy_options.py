# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options for the settings of policies, shared by ``beluga simulate`` and ``beluga gateway``.

They are generated from the fields of :class:`beluga.policy_settings.PolicySettings`, so both
commands have all settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from beluga.errors import RouterError
from beluga.policy_settings import PolicySettings

# Options that are not named after their field.
_NAMED = {"ttft_objective_s": "--slo", "between_tokens_objective_s": "--token-slo"}
# Upper bounds, above which a setting has no meaning.
_MOST = {"usage_ceiling": 1.0, "usage_spread": 1.0, "tree_blocks_max": 1 << 32}
_TAKEN = ("settings", "named")  # the command's parameters that receive them
_CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=typer.Context
)


def with_policy_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``settings`` by an option for each policy setting."""
    return _with_settings(command, ())


def with_settings_and_their_names(command: Callable[..., None]) -> Callable[..., None]:
    """Like :func:`with_policy_settings`, for a command that also receives, as ``named``, the names
    of explicitly given settings.
    """

    @functools.wraps(command)
    def run(*arguments: Any, context: typer.Context | None = None, **given: Any) -> None:
        command(*arguments, named=_named(context), **given)

    return _with_settings(run, (_CONTEXT,))


def _with_settings(
    command: Callable[..., None], more: tuple[inspect.Parameter, ...]
) -> Callable[..., None]:
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in _TAKEN
    ]
    own = [*own, *more]
    added = _parameters()

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> None:
        chosen = {one.name: given.pop(one.name, one.default) for one in added}
        try:
            settings = PolicySettings(**chosen)
        except RouterError as error:  # the text has the setting; add the option
            name, _, what = str(error).partition(" ")
            raise typer.BadParameter(f"{_option_of(name)} {what}") from None
        for name, most in _MOST.items():
            if (getattr(settings, name) or 0) > most:
                raise typer.BadParameter(f"{_option_of(name)} must be at most {most:g}")
        command(*arguments, settings=settings, **given)

    # inspect.signature() would follow __wrapped__ to the original parameters.
    del run.__wrapped__
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
    return run


def _named(context: typer.Context | None) -> frozenset[str]:
    """Return the names of the explicitly given settings."""
    found: set[str] = set()
    if context is None:
        return frozenset()
    for field in dataclasses.fields(PolicySettings):
        source = context.get_parameter_source(field.name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            found.add(field.name)
    return frozenset(found)


def _option_of(name: str) -> str:
    return _NAMED.get(name, f"--{name.replace('_', '-')}")


def _parameters() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(PolicySettings)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], _option(field)],
        )
        for field in dataclasses.fields(PolicySettings)
    ]


def _option(field: dataclasses.Field[Any]) -> Any:
    names = [_NAMED[field.name]] if field.name in _NAMED else []
    return typer.Option(*names, help=field.metadata["help"])
