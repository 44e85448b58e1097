# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Style rules that a program can check, without exceptions, and words that are not used."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from support.shown import ROOT

# ---- Style rules that a program can check, without exceptions.


CSRC = ROOT / "csrc"

# The instructions of each architecture, and the two implementations of the verbs, the first of
# which uses them.
INSTRUCTION_HEADERS = ("coherence/x86.h", "coherence/aarch64.h")
VERBS = (
    *("coherence/coherence.h", "coherence/sim.h", "coherence/instructions.h"),
    *INSTRUCTION_HEADERS,
)

LINE_WIDTH_MAX = 100
FUNCTION_LINES_MAX = 67  # of its code: parameters and docstring are the table of a command

INSTRUCTIONS = re.compile(
    r"\b(clflush|clflushopt|clwb|sfence|mfence|lfence|movnt\w*|movdir64b"
    r"|_mm_(?:clflush|clflushopt|clwb|sfence|mfence|lfence)|_mm\d*_stream_(?:si|load_si|pd|ps)\w*"
    r"|dsb|dmb|stnp|civac|cvac"
    r"|_(?:movdir64b|directstoreu_u\d+)|__atomic_\w+|__sync_\w+|_Atomic|atomic_\w+)\b"
)
# Memory that the processes of one host share, not the pool: atomics are allowed.
HOST_ATOMICS = re.compile(r"__atomic_\w+")
HOST_ATOMICS_FILE = "base/host_atomic.h"
# Instructions on addresses, for the files that implement verbs and streaming copies.
ADDRESS_CALLS = re.compile(
    r"\bbl_(nt16|nt32|nt64|movdir64b|clflush|clflushopt|clwb|flush_lines"
    r"|stnp16|stnp32|dc_civac|dc_cvac|streamed)\("
)
ADDRESS_CALLERS = (
    *("coherence/coherence.h", "coherence/primitives.c", "coherence/x86", "coherence/aarch64"),
)
# Below the pool: state that a process has once (CPU features, the guard's handler, crash points).
HAVE_STATE = ("base/", "coherence/", "transfer/thread_pool.")


def tracked(*suffixes: str) -> list[Path]:
    """The files of the repository with these suffixes: git's list, or the tree without git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        paths = [ROOT / name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("beluga", "csrc", "tests", "bench", "scripts")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        paths = [path for path in paths if path.name not in ("_core.c", "_limit.c")]
    return sorted(p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes))


def sources() -> list[Path]:
    """Return the files that people write: Python, C, CUDA, and the scripts without a suffix."""
    return [
        path
        for path in tracked()
        if path.suffix in (".py", ".c", ".h", ".cu", ".cuh")
        or path.parent.name == ".ci"
        or (not path.suffix and path.is_relative_to(ROOT / "scripts"))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def in_csrc(path: Path) -> str:
    """Return the name of a C file: folder/file."""
    return str(path.relative_to(CSRC))


def code_of(path: Path) -> str:
    """Return C with comments and strings blanked, line numbers kept."""
    token = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return token.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())


def c_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(last line of the signature, lines) of every function whose brace stands on its own line."""
    lines = code_of(path).splitlines()
    start = 0
    for number, line in enumerate(lines):
        if line == "{":
            start = number
        elif line == "}" and start:
            yield lines[start - 1].strip(), number - start + 2
            start = 0


def test_the_checks_cover_files() -> None:
    assert len(sources()) > 40


def test_no_two_test_files_have_one_name() -> None:
    """pytest requires these names."""
    names = Counter(path.name for path in tracked(".py") if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


class Outline(NamedTuple):
    """The facts that the rules need of a Python file; its syntax tree takes a hundred times the
    memory.
    """

    purpose: str | None
    classes: list[str]
    long: list[str]  # functions, with their lines


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield these statements and nested ones, without their expressions."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, part, ())
            yield from statements(inner if isinstance(inner, list) else ())


def statements_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.body[has_docstring:]


@cache
def outline(path: Path) -> Outline:
    tree = ast.parse(path.read_text())
    inside = list(statements(tree.body))
    return Outline(
        ast.get_docstring(tree),
        [node.name for node in inside if isinstance(node, ast.ClassDef)],
        [
            f"{node.lineno} {node.name}"
            for node in inside
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - statements_of(node)[0].lineno >= FUNCTION_LINES_MAX
        ],
    )


def classes_twice(folder: Path) -> dict[str, list[str]]:
    """Return the public classes that several files of a folder define, each with its files."""
    homes: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for name in outline(path).classes:
            if not name.startswith("_"):
                homes.setdefault(name, []).append(str(path.relative_to(folder)))
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_a_class_name_exists_once() -> None:
    assert classes_twice(ROOT / "beluga") == {}


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Report: ...\nclass _Own: ...\n")
    (tmp_path / "two.py").write_text("class Other:\n    class Report: ...\nclass _Own: ...\n")
    assert classes_twice(tmp_path) == {"Report": ["one.py", "two.py"]}


def test_lines_are_narrow() -> None:
    wrong = [
        f"{name_of(path)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_WIDTH_MAX or line != line.rstrip() or "\t" in line
    ]
    assert wrong == []


def test_c_functions_are_short() -> None:
    wrong = [
        f"{name_of(path)}: {signature} has {count} lines"
        for path in tracked(".c", ".h")
        for signature, count in c_functions(path)
        if count > FUNCTION_LINES_MAX
    ]
    assert wrong == []


def test_python_functions_are_short() -> None:
    wrong = [f"{name_of(path)}:{each}" for path in tracked(".py") for each in outline(path).long]
    assert wrong == []


def test_only_the_verbs_name_an_instruction_of_coherence() -> None:
    wrong = [
        f"{in_csrc(path)}: {text}"
        for path in CSRC.rglob("*.[ch]")
        if in_csrc(path) not in VERBS
        for text in INSTRUCTIONS.findall(code_of(path))
        if not (in_csrc(path) == HOST_ATOMICS_FILE and HOST_ATOMICS.fullmatch(text))
    ]
    assert wrong == []
    assert all(INSTRUCTIONS.search(code_of(CSRC / name)) for name in INSTRUCTION_HEADERS)


def test_assembly_is_in_the_headers_of_instructions_only() -> None:
    users = {
        in_csrc(path) for path in CSRC.rglob("*.[ch]") if re.search(r"\basm\b|__asm", code_of(path))
    }
    assert users == set(INSTRUCTION_HEADERS)


def test_only_primitives_call_instructions_by_address() -> None:
    wrong = [
        f"{in_csrc(path)}: {text}"
        for path in CSRC.rglob("*.[ch]")
        if not in_csrc(path).startswith(ADDRESS_CALLERS)
        for text in ADDRESS_CALLS.findall(code_of(path))
    ]
    assert wrong == []


def test_protocol_code_has_no_mutable_state_of_its_own() -> None:
    """Every byte of state belongs to a pool, a server, a client or a simulated world."""
    wrong = []
    for path in CSRC.rglob("*.[ch]"):
        if in_csrc(path).startswith(HAVE_STATE):
            continue
        for line in code_of(path).splitlines():
            at_file_scope = re.match(
                r"(?!typedef|struct \w+;|extern|return|enum)[a-z]\w*[\w \*]*(\[.*\])?\s*(=|;)",
                line,
            )
            inside = re.match(r"\s+static (?!const|inline|bl_site)", line)
            if (at_file_scope and " const " not in f" {line}") or inside:
                wrong.append(f"{in_csrc(path)}: {line.strip()}")
    assert wrong == []


def test_every_sync_label_is_on_both_sides() -> None:
    labels = Counter(
        label
        for path in CSRC.rglob("*.[ch]")
        for label in re.findall(r"\bSYNC ([a-z]\w*(?:\.\w+)+)", path.read_text())
    )
    assert {label for label, count in labels.items() if count < 2} == set()


def test_c_files_state_license_and_purpose() -> None:
    header = "/* SPDX-License-Identifier: Apache-2.0\n * Copyright The Beluga Authors\n *\n * "
    wrong = [name_of(p) for p in tracked(".c", ".h") if not p.read_text().startswith(header)]
    assert wrong == []


def test_python_files_state_their_purpose() -> None:
    wrong = [
        name_of(path)
        for path in tracked(".py")
        if path.stat().st_size and outline(path).purpose is None
    ]
    assert wrong == []


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
def test_there_are_no_todo_markers(mark: str) -> None:
    wrong = [name_of(path) for path in sources() if re.search(rf"\b{mark}\b", path.read_text())]
    assert wrong == []


def test_no_file_names_the_machine_it_was_written_on() -> None:
    place = re.compile(r"/(?:work|root|home/\w+)/|/tmp/(?!beluga\b)\w+")
    text = (".py", ".c", ".h", ".md", ".toml", "")
    wrong = [
        f"{name_of(path)}: {match[0]}"
        for path in tracked(*text)
        for match in place.finditer(path.read_text())
    ]
    assert wrong == []


def stray(root: Path) -> list[str]:
    """Return the files of bench/, docs/, scripts/ and tests/ that are in no room."""
    flat = {
        "bench": ("*.py", r"__init__|_build_limit"),
        "docs": ("*.md", r""),
        "scripts": ("*", r"(?!setup-|gen_|test-)[a-z-]+"),  # commands, none with a suffix
        "tests": ("*.py", r"conftest|test_\w+"),
    }
    return [
        f"{folder}/{path.name}"
        for folder, (pattern, allowed) in flat.items()
        for path in sorted((root / folder).glob(pattern))
        if path.is_file()
        and ((folder == "scripts" and path.suffix) or not re.fullmatch(allowed, path.stem))
    ]


def test_files_are_in_listed_folders(tmp_path: Path) -> None:
    assert stray(ROOT) == []
    wrong = ["bench/new.py", "docs/page.md", "scripts/gen_x.py", "scripts/setup-x", "tests/help.py"]
    right = ["bench/__init__.py", "docs/use/page.md", "scripts/demo", "tests/test_x.py"]
    for name in (*wrong, *right):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert stray(tmp_path) == wrong


# ---- The words that words.md lists occur nowhere in the project, and no name in the code is a
# verb of speaking.


WORDS = "tests/repo/words.md"
# The changelog may name what was renamed.
FREE = {WORDS, "CHANGELOG.md", "tests/repo/test_tidy.py"}
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
