# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routing policies by name, with their settings: ``NAME[:KEY=VALUE,...]``.

To add a policy, write a subclass of :class:`~beluga.router.policies.base.SeededPolicy` in a module
of this package and list it in ``_POLICIES``. Its settings are the fields that it declares by
:func:`~beluga.router.policies.base.setting`. The command line, ``--policy list``, the table in
docs/reference/commands.md, and the tests of every policy's properties follow from that. Costs are
sums of C (``csrc/routing/cost.c``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from beluga.errors import RouterError
from beluga.router.policies.base import PolicySetting, SeededPolicy
from beluga.router.policies.cached import (
    AlphaGamma,
    CacheAware,
    CacheAwareTree,
    Linear,
    LMetric,
    Logit2,
)
from beluga.router.policies.oblivious import LeastTokens, RandomWorker, RoundRobin, TwoChoices
from beluga.router.policies.timed import Estimator, LeastCost, MinTtft
from beluga.router.policy import Policy

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Estimator",
    "make_policy",
    "read_policies",
    "read_policy",
    "settings_of",
]

_POLICIES: dict[str, type[SeededPolicy]] = {
    kind.name: kind
    for kind in (
        RoundRobin,
        RandomWorker,
        TwoChoices,
        LeastTokens,
        Logit2,
        AlphaGamma,
        Linear,
        LMetric,
        CacheAware,
        CacheAwareTree,
        MinTtft,
        LeastCost,
    )
}
POLICIES = tuple(_POLICIES)

DEFAULT_POLICY = LeastCost.name
"""The default policy of ``beluga gateway``, which is also ``--policy default`` of every command."""


def settings_of(name: str) -> dict[str, PolicySetting]:
    """Return the settings of a policy by name. Raises RouterError for an unknown policy."""
    if name not in _POLICIES:
        raise RouterError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    fields = dataclasses.fields(_POLICIES[name])
    return {f.name: f.metadata["setting"] for f in fields if "setting" in f.metadata}


def read_policy(text: str) -> str:
    """Check a policy, ``NAME[:KEY=VALUE,...]``, and return it with the full name: ``default`` is
    the gateway's. Raises RouterError, with the settings of the policy if one is wrong.
    """
    name, _, listed = text.strip().partition(":")
    name = DEFAULT_POLICY if name == "default" else name
    settings_of(name)
    for key, value in _parsed(name, listed).items():
        _checked(name, key, value)
    return f"{name}:{listed}" if listed else name


def read_policies(text: str) -> list[str]:
    """Read policies separated by commas: ``linear:decay=1,credit=2,random`` are two. Raises
    RouterError.
    """
    policies: list[str] = []
    for part in text.split(","):
        if policies and "=" in part and ":" not in part:  # another setting of the same policy
            policies[-1] += f",{part.strip()}"
        else:
            policies.append(part)
    return [read_policy(policy) for policy in policies]


def make_policy(
    policy: str,
    *,
    seed: int = 0,
    estimator: Estimator | None = None,
    defaults: Mapping[str, object] | None = None,
    **settings: object,
) -> Policy:
    """Make a policy of this name, with the settings of its text (``NAME[:KEY=VALUE,...]``) and
    these. Policies that estimate times use the estimator. ``defaults`` replace the defaults of
    those settings that the policy has.

    Raises RouterError for an unknown name or setting, or a value that is out of range.
    """
    name, _, listed = read_policy(policy).partition(":")
    kind = _POLICIES[name]
    chosen = {key: v for key, v in (defaults or {}).items() if key in settings_of(name)}
    chosen |= _parsed(name, listed) | settings
    values = {key: _checked(name, key, value) for key, value in chosen.items()}
    if estimator is not None and kind.uses_estimator:
        values["estimator"] = estimator
    return kind(seed=seed, **values)


def _parsed(name: str, listed: str) -> dict[str, object]:
    pairs = [pair.partition("=") for pair in listed.split(",")] if listed else []
    for key, equals, _ in pairs:
        if not equals:
            raise RouterError(f"policy {name}: {key!r} is not KEY=VALUE; {_settings_text(name)}")
    values: dict[str, object] = {key.strip(): value.strip() for key, _, value in pairs}
    if len(values) < len(pairs):
        raise RouterError(f"policy {name}: {listed!r} has a setting twice; give it once")
    return values


def _checked(name: str, key: str, value: object) -> object:
    declared = settings_of(name).get(key)
    if declared is None:
        raise RouterError(f"policy {name} has no setting {key!r}; {_settings_text(name)}")
    try:
        return declared.read(value)
    except ValueError:
        raise RouterError(
            f"{key} of policy {name} is {value}; give {declared.range}; {_settings_text(name)}"
        ) from None


def _settings_text(name: str) -> str:
    settings = [f"{key}={s.default_text} ({s.range})" for key, s in settings_of(name).items()]
    return f"its settings: {', '.join(settings)}" if settings else "it has no settings"
