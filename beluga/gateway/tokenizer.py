# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engines' tokenizer. With it the router counts and hashes the same tokens as the engines.

The package ``tokenizers`` reads a file (``tokenizer.json``). ``transformers`` reads a model's
directory, whose chat template is needed for a conversation's tokens. Neither package is required.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from beluga.errors import RouterError


class Tokenizer(Protocol):
    """Computes the tokens that an engine would have."""

    def text(self, text: str) -> list[int]:
        """Return the tokens of a completion's prompt."""
        ...

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to the start of the answer. Raises ValueError on
        failure.
        """
        ...


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` or the tokenizer of a model's directory. Raises RouterError."""
    try:
        return _Directory(path) if path.is_dir() else _File(path)
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

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        raise ValueError("a tokenizer.json alone has no chat template")


class _Directory:
    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self._loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)

    def text(self, text: str) -> list[int]:
        return list(self._loaded.encode(text))

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            rendered = self._loaded.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template's own errors, of jinja's types
            raise ValueError(f"the chat template fails: {error}") from error
        return list(self._loaded.encode(rendered, add_special_tokens=False))
