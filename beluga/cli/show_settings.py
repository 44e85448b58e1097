# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga config``: the settings of beluga.toml, and their overrides."""

from __future__ import annotations

import typer

from beluga import config
from beluga.cli.legend import Legend, explains
from beluga.cli.options import Json
from beluga.cli.output import print_json, print_note, print_table
from beluga.cli.settings import FileSettings

_LEGEND = Legend(
    {
        "table": "the command of the setting, or all",
        "key": "the option",
        "value": "the value in the file",
        "unused": "the flag or variable that overrides the setting",
    }
)


@explains(_LEGEND)
def show_settings(ctx: typer.Context, json: Json = False) -> None:
    """Show which beluga.toml is read, and its settings.

    Flags override the environment, the environment overrides the file, and the file overrides
    defaults.
    """
    found = ctx.find_root().obj or FileSettings()
    places = [str(path) for path in config.settings_places()]
    if json:
        rows = [
            {"table": row.table, "key": row.key, "value": row.value, "unused": row.unused}
            for row in found.rows
        ]
        path = None if found.path is None else str(found.path)
        print_json({"file": path, "searched": places, "settings": rows})
        return
    if found.path is None:
        print_note(
            f"there is no settings file: neither --config, BELUGA_CONFIG, {' nor '.join(places)}"
        )
        return
    print_note(f"settings in {found.path}")
    if found.rows:
        print_table(
            _LEGEND,
            [
                [f"[{row.table}]" if row.table else "all", row.key, _show(row.value), row.unused]
                for row in found.rows
            ],
        )


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
