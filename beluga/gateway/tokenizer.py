# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engines' tokenizer. With it the router counts and hashes the same tokens as the engines.

The package ``tokenizers`` reads a file (``tokenizer.json``). ``transformers`` reads a model's
directory, whose chat template is needed for a conversation's tokens. Neither package is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from beluga.errors import RouterError


class Tokenizer(Protocol):
    """Computes the tokens that an engine would have."""

    def text(self, text: str) -> list[int]:
        """Return the tokens of a completion's prompt."""
        ...

    def chat(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation, up to the start of the answer. ``given`` is what
        else the template gets: tools, documents, and so on. Raises ValueError on failure.
        """
        ...

    @property
    def problem(self) -> str:
        """Why the tokens of conversations cannot be computed, or nothing."""
        ...


def load_tokenizer(path: Path, template: Path | None = None) -> Tokenizer:
    """Load a ``tokenizer.json`` or the tokenizer of a model's directory, with the chat template of
    a file, or else its own. Raises RouterError.
    """
    if template is not None and not path.is_dir():
        raise RouterError("--chat-template needs --tokenizer with a model's directory")
    try:
        own = None if template is None else template.read_text()
        return _Directory(path, own) if path.is_dir() else _File(path)
    except ModuleNotFoundError as error:
        name = error.name or "tokenizers"
        raise RouterError(f"--tokenizer {path} needs the package {name}; pip install it") from None
    except Exception as error:  # the packages raise any type
        raise RouterError(f"no tokenizer can be read from {path}: {error}") from None


class _File:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        self._loaded = Loaded.from_file(str(path))

    def text(self, text: str) -> list[int]:
        return list(self._loaded.encode(text).ids)

    problem = (
        "a tokenizer.json alone has no chat template, so conversations are hashed as text; "
        "name the model's directory with --tokenizer"
    )

    def chat(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> list[int]:
        raise ValueError(self.problem)


class _Directory:
    def __init__(self, path: Path, template: str | None) -> None:
        from transformers import AutoTokenizer

        self._loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        if template is not None:
            self._loaded.chat_template = template
        self.problem = ""
        if not self._loaded.chat_template:
            self.problem = (
                "the tokenizer has no chat template, so conversations are hashed as text; give "
                "the engines' by --chat-template"
            )

    def text(self, text: str) -> list[int]:
        return list(self._loaded.encode(text))

    def chat(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> list[int]:
        try:
            rendered = self._loaded.apply_chat_template(
                messages, **{"add_generation_prompt": True, **given, "tokenize": False}
            )
        except Exception as error:  # the template's own errors, of jinja's types
            raise ValueError(f"the chat template fails: {error}") from error
        return list(self._loaded.encode(rendered, add_special_tokens=False))
