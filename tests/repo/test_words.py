# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The words that words.md lists occur nowhere in the project, and no name in the code is a verb of
speaking.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from repo.test_tidy import tracked
from support.shown import ROOT

WORDS = "tests/repo/words.md"
# The changelog may name what was renamed.
FREE = {WORDS, "CHANGELOG.md", "tests/repo/test_words.py"}
IDENTIFIER = "[A-Za-z0-9_]"
# Software does not speak, hear or know: a variable is named after its value (reply, request).
_VERBS = (
    "say said says saying unsaid ask asked asks asking tell told tells telling hear heard hears "
    "know knows want wants vouch vouched speak speaks believe believed whom"
)
SPEAKING = frozenset(_VERBS.split())
FILE_METHOD = "tell"  # of Python's files


def forbidden() -> list[str]:
    """Return the code spans in the first column of the table."""
    rows = (ROOT / WORDS).read_text().splitlines()
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


def found(word: str, text: str, lowered: str | None = None) -> list[int]:
    """Return the lines, from 1, with ``word``. ``lowered`` is the text in small letters."""
    first = word.lower().rstrip("*").split()[0]
    if first not in (text.lower() if lowered is None else lowered):  # much faster than a pattern
        return []
    return [text.count("\n", 0, hit.start()) + 1 for hit in pattern_of(word).finditer(text)]


def test_forbidden_words_do_not_occur() -> None:
    words = forbidden()
    assert len(words) > 50
    wrong = []
    for name, text in files():
        lowered = text.lower()
        lines = ((word, line) for word in words for line in found(word, text, lowered))
        wrong += [f"{name}:{line}: {word}" for word, line in lines]
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


def test_ordinary_english_is_accepted() -> None:
    text = "By the way, take care: port 8000 is in turn. Place it there. A vector of floats; proof."
    assert [word for word in forbidden() if found(word, text)] == []


def names_of(source: str) -> set[str]:
    """Return the identifiers of a Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def speaking(names: set[str]) -> set[str]:
    """Return the names with a verb of speaking, also in a compound, except names of C."""
    return {
        name
        for name in names
        if SPEAKING & set(name.lower().strip("_").split("_"))
        and name != FILE_METHOD
        and not name.startswith(("bl_", "BL_"))
    }


def test_no_name_has_a_verb_of_speaking() -> None:
    """The names of variables, attributes and parameters; prose is another matter."""
    wrong = [
        f"{name}: {word}"
        for name, text in files()
        if name.endswith(".py")
        for word in sorted(speaking(names_of(text)))
    ]
    assert wrong == []


def test_a_verb_of_speaking_is_found_in_code_only() -> None:
    code = 'told = 1  # asked\nx.said = f(wants=2, a="knows")\n'
    assert speaking(names_of(code)) == {"told", "said", "wants"}
    assert speaking({"_has_told", "SAID_MAX", "wanted", "bl_told"}) == {"_has_told", "SAID_MAX"}
