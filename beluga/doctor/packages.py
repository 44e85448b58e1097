# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of Python packages: engines, and packages of optional parts of Beluga."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beluga.connectors import RELEASES
from beluga.doctor.finding import Verdict, error, ok, unknown, warning
from beluga.doctor.machine import Machine

Check = Callable[[Machine], Verdict]


def engine_check(name: str) -> Check:
    """Return the check of one engine's version. The engine is not imported."""
    releases = RELEASES[name]

    def check(machine: Machine) -> Verdict:
        version = machine.version(name)
        if version is None:
            return ok(f"{name} is not in this environment")
        fix = f"pip install '{releases.requirement}'"
        known = releases.has(version)
        if known is None:
            return unknown(f"{name} has version {version[:40]!r}", fix)
        if known:
            return ok(f"{name} {version}")
        if releases.refused:
            text = f"the connector refuses {name} {version}; it needs {releases.requirement}"
            return error(text, fix)
        return warning(f"{name} {version} is not tested; {releases.requirement} is", fix)

    return check


@dataclass(frozen=True, slots=True)
class Extra:
    """A package that some part of Beluga needs."""

    module: str
    distribution: str
    extra: str  # of beluga-kv
    user: str  # the part that needs it


EXTRAS = (
    Extra("zmq", "pyzmq", "router", "KV events need it"),
    Extra("uvloop", "uvloop", "router", "the gateway needs less of the CPU with it"),
    Extra("obstore", "obstore", "tiers", "remote tiers in object stores (s3://) need it"),
    Extra("redis", "redis", "tiers", "remote tiers in Redis or Valkey need it"),
)


def extra_check(extra: Extra) -> Check:
    """Return the check of one optional package. A missing package is not an error."""

    def check(machine: Machine) -> Verdict:
        fix = f"pip install 'beluga-kv[{extra.extra}]'"
        version = machine.version(extra.distribution)
        if version is None:
            return ok(f"{extra.module} is not installed; only {extra.user}: {fix}")
        if (why := machine.why_no_import(extra.module)) is not None:
            again = f"pip install --force-reinstall {extra.distribution}"
            return warning(f"{extra.distribution} {version} cannot be imported ({why})", again)
        return ok(f"{extra.distribution} {version}")

    return check
