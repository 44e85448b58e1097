# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options for policy settings: both commands that route have all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from beluga.cli.app import app
from beluga.router import DEFAULT_POLICY, POLICIES, PolicySettings, settings_known

# Parameters of policies that are not settings of a command line: a model of the engines, which
# --model and --costs name, and the deprecated form of --prefill-scale.
NO_SETTINGS = {"estimator", "overlap_score_weight"}


def options(command: str) -> dict[str, dict[str, Any]]:
    """Return the help of a command's options, by their parameters' names."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    parts = ("opts", "secondary_opts", "default", "help", "show_default", "metavar")
    return {one.name: {part: getattr(one, part, None) for part in parts} for one in found.params}


def test_both_commands_have_every_setting_of_every_policy() -> None:
    settings = {field.name for field in dataclasses.fields(PolicySettings)}
    assert settings == set().union(*map(settings_known, POLICIES)) - NO_SETTINGS
    simulated, routed = options("simulate"), options("gateway")
    assert settings <= simulated.keys()
    assert {name: simulated[name] for name in settings} == {name: routed[name] for name in settings}


def test_the_gateway_gets_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    service = pytest.importorskip("beluga.gateway", reason="the router's packages are missing")
    seen: list[Any] = []

    async def serve(settings: Any, *_: object) -> None:
        seen.append(settings)

    monkeypatch.setattr(service, "serve_together", serve)
    given = "--policy linear --shared-credit 1 --no-track-prefill --slo 2.5 --costs"
    arguments = ["gateway", *given.split(), "llama-3.1-8b-h200", "--worker", "http://a:1"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert seen[0].policy == "linear"
    assert seen[0].costs.name == "llama-3.1-8b-h200"
    assert seen[0].policy_settings == PolicySettings(
        shared_credit=1.0, track_prefill=False, ttft_objective_s=2.5
    )
    CliRunner().invoke(app, ["gateway", "--worker", "http://a:1"])
    assert (seen[1].policy, seen[1].policy_settings) == (DEFAULT_POLICY, PolicySettings())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PolicySettings)])
def test_a_setting_below_zero_is_refused(name: str) -> None:
    from beluga.errors import RouterError

    wrong: dict[str, Any] = {name: -1}
    with pytest.raises(RouterError, match=f"{name} is -1, but must be"):
        PolicySettings(**wrong)
