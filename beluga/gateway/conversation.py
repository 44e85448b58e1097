# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tokens that an engine computes for a prompt: a conversation is rebuilt from a request as vLLM
does, a chat template is applied to it, and the engines' tokenizer converts the text.

Example: a response's item ``{"type": "function_call", "call_id": "1", "name": "f", "arguments":
"{}"}`` after an assistant's message becomes a ``tool_calls`` of that message.

Functions that rebuild a conversation raise ValueError, KeyError, TypeError or AttributeError for a
request that vLLM rejects, or whose prompt is not only text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from beluga.errors import RouterError
from beluga.text import read_text

# ---- Fields of a request to messages


Message = dict[str, Any]

_TEXT_OF = {  # the field with the text of a part, by the part's type
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING = "x-anthropic-billing-header"  # vLLM drops this line, which differs in each request
_UNFINISHED = ("in_progress", "incomplete")


class ChatFields(msgspec.Struct):
    """The fields of a request that are part of its prompt, except its messages."""

    instructions: Any = None  # this and the next two: only in /v1/responses
    reasoning: Any = None
    previous_response_id: Any = None
    tools: Any = None
    documents: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    add_special_tokens: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, and everything else that determines the prompt.

    ``given`` are the template's further variables. ``template`` is the request's own, to be used
    only if requests are trusted. ``special_tokens``: the tokenizer adds its own, such as one for
    the beginning.
    """

    messages: list[Message]
    given: dict[str, Any]
    template: str | None = None
    special_tokens: bool = False


def of_chat(fields: ChatFields, messages: list[Message]) -> Conversation:
    """Return the conversation of a request to ``/v1/chat/completions``."""
    given = {
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        "documents": fields.documents,
    }
    return Conversation(
        [_with_calls_in_order(message) for message in messages],
        _given(fields, fields.reasoning_effort, given),
        fields.chat_template,
        bool(fields.add_special_tokens),
    )


def _with_calls_in_order(message: Message) -> Message:
    """Return a message whose calls have their fields in vLLM's order, in which a template prints
    them.
    """
    if message.get("role") != "assistant" or not message.get("tool_calls"):
        return message
    calls = [
        _ordered(call, "id", "function", "type")
        | {"function": _ordered(call["function"], "arguments", "name")}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _ordered(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def of_responses(fields: ChatFields, content: str | list[Message]) -> Conversation:
    """Return the conversation of a request to ``/v1/responses``."""
    if fields.previous_response_id is not None:
        raise ValueError("the earlier response is only available in its engine")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    first = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    goes_on = bool(items) and _is_unfinished(items[-1])
    given = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    effort = None if fields.reasoning is None else fields.reasoning.get("effort")
    return Conversation(
        [*first, *_messages_of(items)], _given(fields, effort, given), special_tokens=True
    )


def _given(fields: ChatFields, effort: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Return the chat template's further variables: the client's own settings, overridden by the
    request's fields, except for tools. Settings that are null or "auto" are left out.
    """
    own: dict[str, Any] = fields.chat_template_kwargs or {}
    if own.keys() & {"chat_template", "tokenize"}:
        raise ValueError("chat_template_kwargs has a name that is not a template variable")
    if effort is not None and "enable_thinking" not in own:
        named["enable_thinking"] = effort != "none"
    named["reasoning_effort"] = effort
    tools = [_tool(tool) for tool in fields.tools] if fields.tools else None
    given = {"tools": tools, **_set(own), **_set(named)}
    return _set(given)


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _tool(tool: Message) -> Message:
    """Return a tool with its fields in vLLM's order, in which a template prints them. Tools of
    responses are not wrapped in ``function``.
    """
    if tool.get("type", "function") != "function":
        raise ValueError("only tools of type function are supported")
    declared = tool.get("function", tool)
    function = {name: declared.get(name) for name in ("name", "description", "parameters")}
    function |= {
        name: declared[name]
        for name in ("strict", "defer_loading")
        if declared.get(name) is not None
    }
    return {"type": "function", "function": function}


def _is_unfinished(item: Message) -> bool:
    """Return whether the model should continue a response's last item."""
    kind = item.get("type", "message")
    return kind in ("message", "reasoning") and item.get("status") in _UNFINISHED


def _messages_of(items: Iterable[Message]) -> list[Message]:
    """Return the messages of a response's items. An assistant's reasoning, text and calls are one
    message.
    """
    messages: list[Message] = []
    for item in items:
        part = _part_of(item)
        if part is None:
            messages.append(dict(item))
            continue
        roles = {part["role"], messages[-1]["role"] if messages else None}
        last = messages[-1] if roles == {"assistant"} else None
        if last is not None and isinstance(part.get("tool_calls"), list):
            last["tool_calls"] = [*(last.get("tool_calls") or ()), *part["tool_calls"]]
        elif last is not None and all(last.get(name) is None for name in part.keys() - {"role"}):
            last.update(part)
        else:
            messages.append(part)
    return messages


def _part_of(item: Message) -> Message | None:
    """Return the content of an item in chat format, or None if it is already a message."""
    kind, role = item.get("type"), item.get("role")
    if item.get("namespace"):
        raise ValueError("only functions outside namespaces are supported")
    if kind == "function_call":
        return _call(item["call_id"], item["name"], item["arguments"])
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        return _call(item["call_id"], item["name"], arguments)
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise ValueError("encrypted reasoning is not supported")
        content_parts = item.get("content") or item.get("summary") or [{"text": ""}]
        return {"role": "assistant", "reasoning": content_parts[0]["text"]}
    if role == "assistant":
        content = item.get("content")
        if isinstance(content, list) and content:
            content = content[0]["text"]  # vLLM ignores the others
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
    if role is None:
        raise ValueError(f"items of type {kind} are not supported")
    return None


def _call(name_of_call: str, function: str, arguments: str) -> Message:
    call = {
        "id": name_of_call,
        "function": {"name": function, "arguments": arguments},
        "type": "function",
    }
    return {"role": "assistant", "tool_calls": [call]}


def for_template(messages: Iterable[Message], *, as_parts: bool) -> list[Message]:
    """Return messages for a chat template: with their texts joined into one string, or each in its
    own part if the template uses parts.
    """
    return [_for_template(message, as_parts) for message in messages]


def _for_template(message: Message, as_parts: bool) -> Message:
    role = message["role"]
    texts = list(_texts(message.get("content")))
    if role == "system":
        texts = [text for text in map(_without_billing, texts) if text is not None]
    whole = not as_parts or role == "tool"
    content = "\n".join(texts) if whole else [{"type": "text", "text": text} for text in texts]
    normalized: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            normalized["tool_calls"] = [_with_arguments(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            normalized["reasoning"] = normalized["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        normalized["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        normalized["tools"] = message.get("tools")
    normalized |= {
        name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)
    }
    return normalized


def _texts(content: Any) -> Iterable[str]:
    """Yield the texts of a message's content."""
    if content is None:
        return
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, str):
            yield part
            continue
        kind = part["type"]
        text = part[_TEXT_OF[kind]]  # KeyError for an image
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise TypeError("a part's text is not a string")
        yield text


def _without_billing(text: str) -> str | None:
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2] or None


def _with_arguments(call: Message) -> Message:
    """Return a call whose arguments are an object, not JSON; broken ones are an empty object."""
    if call.get("type", "function") != "function":
        raise ValueError("only calls of functions are supported")
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def with_system_first(messages: list[Message]) -> list[Message]:
    """Return messages for a template without the role developer: it becomes system, and all system
    messages become one at the start, if there are several or a later one.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    made = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    indices = [at for at, message in enumerate(made) if message["role"] == "system"]
    if indices == [0]:
        return made
    texts = ["\n".join(_texts(made[at]["content"])) for at in indices]
    system = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [system, *(message for message in made if message["role"] != "system")]


# ---- Templates that use the parts of a content


_TRAINING = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags that are not part of Jinja


@lru_cache(maxsize=32)
def looks_at_parts(template: str) -> bool:
    """Return whether a template uses the parts of a message's content, by vLLM's rule
    (``--chat-template-content-format auto``): whether it has a loop over them.

    Example: ``{% for m in messages %}{% for part in m.content %}...`` uses parts, and gets even a
    plain text as a list of one part. Other templates get a message's texts joined by newlines.
    """
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
    parameters: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False)]
        given += [(item.key, item.value) for item in call.kwargs if item.key in names]
        parameters |= {name for name, value in given if _is_content(value, messages)}
    return parameters


# ---- Tokenizers


class Tokenizer(Protocol):
    """Computes the tokens that an engine would compute."""

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the tokens of a completion's prompt. ``special_tokens``: the tokenizer adds its
        own.
        """
        ...

    def chat(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation, up to the start of the answer. Raises ValueError on
        failure.
        """
        ...

    @property
    def problem(self) -> str:
        """Why the tokens of conversations cannot be computed, or ""."""
        ...


def load_tokenizer(
    path: Path, template: Path | None = None, *, trusted: bool = False, is_model: bool = False
) -> Tokenizer:
    """Load a ``tokenizer.json`` or the tokenizer of a model's folder, with the chat template from a
    file, or its own. ``trusted`` requests may bring another one. ``is_model``: a ``path`` that is
    no folder is a model's name in the cache of ``transformers``. Raises RouterError.

    The package ``tokenizers`` reads the file; ``transformers`` reads the folder, whose chat
    template is needed for conversations. Neither package is required.
    """
    if template is not None and not path.is_dir():
        raise RouterError("--chat-template needs --tokenizer with a model's folder")
    try:
        own = None if template is None else read_text(template)
        if is_model or path.is_dir():
            return _Directory(path, own, trusted=trusted)
        return _File(path)
    except ModuleNotFoundError as error:
        name = error.name or "tokenizers"
        raise RouterError(f"--tokenizer {path} needs the package {name}; pip install it") from None
    except Exception as error:  # the packages raise any type
        raise RouterError(f"the tokenizer {path} cannot be read: {error}") from None


class _File:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        self._loaded = Loaded.from_file(str(path))

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=special_tokens).ids)

    problem = (
        "a tokenizer.json alone has no chat template, so conversations are hashed as text; give "
        "the model's folder with --tokenizer"
    )

    def chat(self, conversation: Conversation) -> list[int]:
        raise ValueError(self.problem)


class _Directory:
    def __init__(self, path: Path, template: str | None, *, trusted: bool) -> None:
        from transformers import AutoTokenizer

        self._loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        self._trusted = trusted
        if template is not None:
            self._loaded.chat_template = template
        self.problem = ""
        if not self._loaded.chat_template:
            self.problem = (
                "the tokenizer has no chat template, so conversations are hashed as text; give "
                "the engines' with --chat-template"
            )
        else:  # requires jinja2, and raises now if it is missing
            looks_at_parts(self._template(None, None))

    def _template(self, own: str | None, tools: object) -> str:
        """Return the chat template of a request with these tools."""
        template: str = self._loaded.get_chat_template(own, tools=tools)
        return template

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=special_tokens))

    def chat(self, conversation: Conversation) -> list[int]:
        if conversation.template is not None and not self._trusted:
            raise ValueError("chat templates in requests are not trusted")
        try:
            template = self._template(conversation.template, conversation.given.get("tools"))
            messages = for_template(conversation.messages, as_parts=looks_at_parts(template))
            if "'developer'" not in template and '"developer"' not in template:
                messages = with_system_first(messages)
            rendered = self._loaded.apply_chat_template(
                messages,
                **{**conversation.given, "chat_template": template, "tokenize": False},
            )
        except Exception as error:  # the template's own errors, of jinja2's types
            raise ValueError(f"the chat template failed: {error}") from error
        return self.text(rendered, special_tokens=conversation.special_tokens)
