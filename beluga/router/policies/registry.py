# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The registry of policies, by their names on the command line. It makes every policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from beluga.errors import RouterError
from beluga.policy_settings import PolicySettings
from beluga.router.policies.alpha_gamma import AlphaGamma
from beluga.router.policies.cache_aware import CacheAware, CacheAwareTree
from beluga.router.policies.least_cost import LeastCost
from beluga.router.policies.linear import Linear
from beluga.router.policies.lmetric import LMetric
from beluga.router.policies.logit2 import Logit2
from beluga.router.policies.min_ttft import MinTtft
from beluga.router.policies.oblivious import LeastTokens, RandomWorker, RoundRobin, TwoChoices
from beluga.router.policy import Policy

_POLICIES: dict[str, Callable[..., Policy]] = {
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


def policy_name(text: str) -> str:
    """Resolve the name of a policy; ``default`` is the gateway's. Raises RouterError."""
    name = DEFAULT_POLICY if text == "default" else text
    if name not in _POLICIES:
        raise RouterError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    return name


def settings_known(name: str) -> frozenset[str]:
    """Return the names of a policy's settings. Raises RouterError for an unknown policy."""
    return frozenset(inspect.signature(_POLICIES[policy_name(name)]).parameters) - {"seed"}


def make_policy(name: str, *, seed: int = 0, **settings: object) -> Policy:
    """Make the policy of that name, one of ``POLICIES``, with these settings: those of
    :class:`PolicySettings` that it has.

    Raises RouterError for an unknown name or setting.
    """
    known = settings_known(name)
    if wrong := sorted(set(settings) - known):
        has = ", ".join(sorted(known)) or "no settings"
        raise RouterError(f"policy {name} has no setting {wrong[0]!r}; it has {has}")
    return _POLICIES[policy_name(name)](seed=seed, **settings)


def configured_policy(
    name: str, settings: PolicySettings, *, seed: int = 0, **parts: object
) -> Policy:
    """Make a policy with those of the settings and ``parts`` that it accepts."""
    known = settings_known(name)
    taken = {key: value for key, value in (settings.given() | parts).items() if key in known}
    return make_policy(name, seed=seed, **taken)
