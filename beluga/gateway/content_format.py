# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Detects whether a chat template uses the parts of a message's content, by vLLM's rule
(``--chat-template-content-format auto``): whether it has a loop over them.

Example: ``{% for m in messages %}{% for part in m.content %}...`` uses parts, and gets even a plain
text as a list of one part. Other templates get a message's texts joined by newlines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_TRAINING = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags that are not part of Jinja


@lru_cache(maxsize=32)
def looks_at_parts(template: str) -> bool:
    """Return whether a template has a loop over a message's content."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        jinja = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  it only parses
        tree = jinja.parse(_TRAINING.sub("", template))
        return any(_content_loops(tree, _message_names(tree)))
    except (TemplateSyntaxError, _StrangeError):
        return False


class _StrangeError(Exception):
    """The template assigns messages to something other than a name, which vLLM does not support."""


def _bare(node: Any) -> Any:
    """Strip filters, tests and slices from an expression."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: Any) -> str | None:
    """Return the variable of an expression, if it is one."""
    from jinja2 import nodes

    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) and bare.ctx == "load" else None


def _is_content(node: Any, messages: set[str]) -> bool:
    """Return whether an expression is the content of one of these messages."""
    from jinja2 import nodes

    bare = _bare(node)
    if isinstance(bare, nodes.Getattr):
        field = bare.attr
    elif isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        field = bare.arg.value
    else:
        return False
    owner = bare.node
    return field == "content" and isinstance(owner, nodes.Name) and owner.name in messages


def _target(node: Any) -> str:
    from jinja2 import nodes

    if not isinstance(node, nodes.Name):
        raise _StrangeError
    return str(node.name)


def _message_names(tree: Any) -> set[str]:
    """Return the names of single messages: the targets of loops over the messages."""
    from jinja2 import nodes

    lists = {"messages"}
    while (
        more := {
            _target(node.target)
            for node in tree.find_all(nodes.Assign)
            if _name(node.node) in lists
        }
        - lists
    ):
        lists |= more
    return {_target(loop.target) for loop in tree.find_all(nodes.For) if _name(loop.iter) in lists}


def _content_loops(tree: Any, messages: set[str]) -> Iterator[bool]:
    """Yield for each loop whether it iterates over a message's content."""
    from jinja2 import nodes

    parameters: dict[int, set[str]] = {}  # parameters of the enclosing macro that get contents
    for macro in tree.find_all(nodes.Macro):
        got = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            parameters[id(loop)] = got | parameters.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        plain = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        yield (
            _is_content(loop.iter, messages)
            or plain in parameters.get(id(loop), ())
            or (plain == "content" and id(loop) not in parameters)
        )


def _content_parameters(tree: Any, macro: Any, messages: set[str]) -> set[str]:
    """Return the parameters of a macro that get a message's content in some call."""
    from jinja2 import nodes

    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(each.key, each.value) for each in call.kwargs if each.key in names]
        found |= {name for name, value in given if _is_content(value, messages)}
    return found
