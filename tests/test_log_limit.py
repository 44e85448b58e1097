# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The first message of each kind is logged at once, and no file has a limit of its own."""

from __future__ import annotations

import re

from repo.test_tidy import ROOT, tracked
from support.virtual_clock import Clock

from beluga.limit import PERIOD_S, LogLimit, and_more, kind_of

# The code of files that limited their own log, with one time for all kinds.
OWN = re.compile(r"_warned_(s|at)\b|_next_warning|_log_at\b|\b_?(WARN|LOG_EVERY|WARN_EVERY)_S\b")


def test_each_kind_is_logged_at_once_and_then_once_in_a_period() -> None:
    clock = Clock()
    limit = LogLimit(clock=lambda: clock.now_s)
    assert limit.passes("load", "timeout") == 0
    assert limit.passes("load", "timeout") is None
    assert limit.passes("load", "damaged") == 0  # a second kind is not hidden behind the first
    assert limit.passes("save", "timeout") == 0
    clock.now_s += PERIOD_S - 1
    assert limit.passes("load", "timeout") is None
    clock.now_s += 1
    assert limit.passes("load", "timeout") == 2
    assert limit.passes("load", "damaged") == 0
    clock.now_s += PERIOD_S
    assert limit.passes("load", "timeout") == 0


def test_message_kinds_from_outside_take_bounded_memory() -> None:
    clock = Clock()
    limit = LogLimit(clock=lambda: clock.now_s)
    assert limit.passes("mine") == 0
    assert [limit.passes(str(number)) for number in range(10_000)] == [0] * 10_000
    assert len(limit._kinds) <= 256


def test_kind_of_an_error_has_its_errno() -> None:
    assert kind_of(ValueError("a")) == kind_of(ValueError("b")) == "ValueError"
    assert kind_of(OSError(5, "a")) != kind_of(OSError(28, "a"))
    assert (and_more(0), and_more(3)) == ("", " (3 more of this kind since it was last logged)")


def test_only_one_module_limits_log_messages() -> None:
    own = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] == "beluga" and path.name != "limit.py"
        for found in OWN.finditer(path.read_text())
    ]
    assert own == []
