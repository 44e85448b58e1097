# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks command lines of units and manifests with the parser of the command."""

from repo.test_docs import KNOWN, check_plugin, found_command

__all__ = ["check_command", "check_plugin"]


def check_command(program: str, words: list[str]) -> None:
    """Raise the parser's error if these words are not a valid command line of ``beluga`` or
    ``cxl-rpc``.
    """
    line = [program, *words]
    name = found_command(line)
    assert name is not None, line
    KNOWN[name].make_context(name, line[len(name.split()) :])
