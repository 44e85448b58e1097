# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga explain``, ``ls`` and ``rm`` on a served pool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.usefixtures("server")


def test_keys_are_explained_listed_and_removed(run: Run, pool: list[str]) -> None:
    run("put", "one", "-", *pool, stdin="bytes")
    run("put", "two", "-", *pool, "--namespace", "other", stdin="more bytes")
    result = run("explain", "one", "two", "three", *pool)
    assert result.returncode == 1
    one, two, three = result.stdout.splitlines()
    assert one.startswith("one: hit, stored: 5 bytes")
    assert two.startswith("two: miss, namespace: it is stored in another namespace")
    assert "name is 'other' there and 'cli' here" in two
    assert three.startswith("three: miss, never: ")
    assert run("explain", "one", *pool).returncode == 0
    found = json.loads(run("explain", "two", *pool, "--field", "name=other", "--json").stdout)
    assert [(each["name"], each["cause"]) for each in found] == [("two", "stored")]
    blocks = json.loads(run("ls", *pool, "--json").stdout)
    assert sorted((block["namespace"], block["bytes"]) for block in blocks) == [
        ("cli", 5),
        ("other", 10),
    ]
    assert len(json.loads(run("ls", *pool, "--json", "--limit", 1).stdout)) == 1
    spaces = json.loads(run("ls", *pool, "--namespaces", "--json").stdout)
    assert sorted(space["fields"] for space in spaces) == ["name=cli", "name=other"]
    other = next(space["namespace"] for space in spaces if space["fields"] == "name=other")
    assert run("rm", "two", *pool, "--namespace", other).stderr == "removed: 1 of 1\n"
    refused = run("rm", "two", *pool, "--namespace", other)
    assert refused.returncode == 1
    assert refused.stderr.startswith("beluga: error: there is no block 'two' in that namespace")
    assert "name=other" not in run("ls", *pool, "--namespaces").stdout


def test_every_missing_key_is_listed(run: Run, pool: list[str]) -> None:
    assert "no block 'a', 'b', 'c' in that namespace" in run("rm", "a", "b", "c", *pool).stderr
    many = run("rm", *map(str, range(7)), *pool).stderr
    assert "no block '0', '1', '2', '3', '4' and 2 more in that namespace" in many


def test_explain_reports_an_unknown_fingerprint(run: Run, pool: list[str]) -> None:
    result = run("explain", "key", *pool, "--namespace", "0123456789abcdef")
    assert result.returncode == 1
    assert (
        "no namespace with the fingerprint 0123456789abcdef, so it is taken as a name"
        in result.stderr
    )


def test_control_characters_of_a_namespace_are_escaped(run: Run, pool: list[str]) -> None:
    run("put", "key", "-", *pool, "--namespace", "\x1b[2Jred", stdin="some bytes")
    for words in (["ls"], ["ls", "--namespaces"]):
        shown = run(*words, *pool).stdout
        assert "?[2Jred" in shown
        assert "\x1b" not in shown
