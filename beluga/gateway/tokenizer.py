# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engines' tokenizer, with which the router counts and hashes the same tokens as the engines.

The package ``tokenizers`` reads a file (``tokenizer.json``). ``transformers`` reads a model's
folder, whose chat template is needed for conversations. Neither package is required.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from beluga.errors import RouterError
from beluga.gateway.content_format import looks_at_parts
from beluga.gateway.conversation import Conversation, for_template, with_system_first
from beluga.text import read_text


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


def load_tokenizer(path: Path, template: Path | None = None, *, trusted: bool = False) -> Tokenizer:
    """Load a ``tokenizer.json`` or the tokenizer of a model's folder, with the chat template from a
    file, or its own. ``trusted`` requests may bring another one. Raises RouterError.
    """
    if template is not None and not path.is_dir():
        raise RouterError("--chat-template needs --tokenizer with a model's folder")
    try:
        own = None if template is None else read_text(template)
        return _Directory(path, own, trusted=trusted) if path.is_dir() else _File(path)
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
        found: str = self._loaded.get_chat_template(own, tools=tools)
        return found

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
