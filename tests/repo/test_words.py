# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The words that docs/reference/glossary.md lists as not used occur nowhere in the project."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from repo.test_tidy import tracked
from support.shown import ROOT

GLOSSARY = "docs/reference/glossary.md"
SECTION = "## Words that are not used"
# The changelog may name what was renamed.
FREE = {GLOSSARY, "CHANGELOG.md", "tests/repo/test_words.py"}
IDENTIFIER = "[A-Za-z0-9_]"


def forbidden() -> list[str]:
    """Return the code spans in the first column of the glossary's last table."""
    rows = (ROOT / GLOSSARY).read_text().partition(SECTION)[2].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    return [word for cell in cells for word in re.findall("`([^`]+)`", cell)]


def pattern_of(word: str) -> re.Pattern[str]:
    """Return the pattern that finds a forbidden word in a text.

    A capitalized name is an identifier: it is not the first word of a sentence, which a space and a
    small letter follow.
    """
    if word[0].isupper():
        return re.compile(
            rf"(?<!{IDENTIFIER}){word}(?!{IDENTIFIER}|'| [a-z(])(?<!\b(?:A|I) {word})"
        )
    if word.endswith("*"):
        return re.compile(rf"(?<!{IDENTIFIER}){re.escape(word[:-1])}")
    spaced = re.escape(word).replace(r"\ ", r"\s+(?:\*\s+|#\s+|//\s+)?")
    return re.compile(rf"(?<!{IDENTIFIER}){spaced}(?!{IDENTIFIER})", re.IGNORECASE)


def files() -> Iterator[tuple[str, str]]:
    """Return the name and the text of each file of the project."""
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if name in FREE or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content and not content.startswith(b"\x1f\x8b"):  # neither binary nor gzip
            yield name, content.decode()


def found(word: str, text: str) -> list[int]:
    """Return the lines, from 1, with ``word``."""
    return [text.count("\n", 0, hit.start()) + 1 for hit in pattern_of(word).finditer(text)]


def test_old_words_are_gone() -> None:
    words = forbidden()
    assert len(words) > 50
    wrong = []
    for name, text in files():
        wrong += [f"{name}:{line}: {word}" for word in words for line in found(word, text)]
        wrong += [f"{name}: its name has {word}" for word in words if found(word, name)]
    assert wrong == []


@pytest.mark.parametrize("word", forbidden())
def test_an_old_word_is_found_in_any_context(word: str) -> None:
    whole = word.removesuffix("*") + ("open" if word.endswith("*") else "")
    for text in (f"x = {whole}(1)", f"/* of {whole}, and\n * more */", f'{{"a": "{whole}"}}'):
        assert found(word, text) == [1]
    if " " in word:
        assert found(word, "/* " + whole.replace(" ", "\n * ") + " */") == [1]
    assert found(word, f"pre{whole}") == []


def test_ordinary_english_is_free() -> None:
    text = "By the way, take care: port 8000 is in turn. Place it there. A vector of floats; proof."
    assert [word for word in forbidden() if found(word, text)] == []
