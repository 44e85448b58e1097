# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes each plain condition of the protocol's C a site of the simulator, in a copy of the source.

Conditions are those of ``if``, ``while`` and ``?``, and each operand of ``&&`` and ``||``: ``if (a
&& f(b))`` becomes ``if (BL_CONDITION("true|a", a) && BL_CONDITION("true|f(b)", f(b)))``. The name
has the value that drops the condition. The operand of an ``&&`` is dropped when it is always true,
that of an ``||`` when it is always false, and so is a condition that guards a ``return``,
``break``, ``continue`` or ``goto``; what decides between two things (``if`` with an ``else``,
``?``) is tried with ``either`` value; any other is dropped when it is always true. All of an ``if
(a && b)`` is tried as false, too. One extension is compiled of the copy, with every condition in
it, and a run names the one to force.

Comments, lines of the preprocessor, checks (``bl_verify``, which are sites already) and plain
conditions of ``for`` stay as they are; so does everything outside of functions.
"""

import hashlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import simulator  # noqa: F401  before native: it finds the folder
from native import build_sim

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "conditions"

# The files through which the hosts of a pool communicate, and those that these depend on: lines,
# lanes, the lobby, servers, elections; the block index, pins, grants, removals, names, recovery,
# tasks; puts and gets; cache maintenance for devices.
PROTOCOL = (
    *("format/line.h", "pool/message.h", "pool/register.h", "pool/epoch.h", "rpc/lobby.c"),
    *("rpc/lane.c", "rpc/session.c", "rpc/housekeeping.c", "rpc/server.c", "rpc/quantum.h"),
    "rpc/doorbell.c",
    *("rpc/standby.c", "rpc/elect.c", "rpc/takeover.c", "index/table.c", "index/retained.c"),
    *("index/pins.c", "index/reclaim.c", "index/lookup.c", "index/grant.c"),
    *("index/numbers.c", "index/tombstones.c", "index/journal.c"),
    *("index/task_call.c", "index/retire.c", "index/recover_sort.h", "index/recover.c"),
    *("index/stat.c", "index/index.c", "index/client.c", "index/task_client.c"),
    *(
        "transfer/device_range.h",
        "transfer/cache_maintenance.c",
        "kvcache/batch.h",
        "kvcache/batch.c",
        "kvcache/engine.c",
    ),
    *("kvcache/put.c", "kvcache/get.c"),
)

TOKEN = re.compile(
    r"""(?P<blank>\s+|/\*.*?\*/|(?<![^\n])[ \t]*\#(?:\\\n|[^\n])*)
      | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<word>\w+)
      | (?P<sign><<=|>>=|&&|\|\||->|\+\+|--|[-+*/%&|^=!<>]=|<<|>>|.)""",
    re.DOTALL | re.VERBOSE,
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
ENDS = {";", ",", ":", "return", "else", "do", "case", "goto", *ASSIGNMENTS}
JUMPS = {"return", "break", "continue", "goto"}


@dataclass(frozen=True)
class Token:
    """A piece of source with the blanks and comments before it."""

    blank: str
    text: str


def tokens_of(source: str) -> list[Token]:
    """Return all tokens; the last one is empty and has the blanks at the end."""
    found = []
    blank = ""
    for match in TOKEN.finditer(source):
        if match.lastgroup == "blank":
            blank += match.group()
        else:
            found.append(Token(blank, match.group()))
            blank = ""
    return [*found, Token(blank, "")]


class Rewriter:
    """Finds the conditions of one file."""

    def __init__(self, source: str) -> None:
        self.tokens = tokens_of(source)
        self.before: dict[int, str] = {}  # text that is written before a token,
        self.after: dict[int, int] = {}  # and the number of parentheses after it
        self.partner: dict[int, int] = {}
        open_: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in CLOSING:
                open_.append(i)
            elif token.text and token.text in CLOSING.values():
                self.partner[open_.pop()] = i

    def text(self, start: int, end: int) -> str:
        """Return tokens [start, end) with single blanks, as a C string."""
        words = "".join(
            (" " if token.blank and i > start else "") + token.text
            for i, token in enumerate(self.tokens[start:end], start)
        )
        return words.replace("\\", "\\\\").replace('"', '\\"')

    def rewritten(self) -> str:
        """Return the source with every condition of its functions in a BL_CONDITION()."""
        i = 0
        while i < len(self.tokens):
            if self.tokens[i].text == "{" and i > 0 and self.tokens[i - 1].text == ")":
                self.body(i + 1, self.partner[i])
            i = self.partner.get(i, i) + 1
        return "".join(
            token.blank + self.before.get(i, "") + token.text + ")" * self.after.get(i, 0)
            for i, token in enumerate(self.tokens)
        )

    def drop(self, start: int) -> str:
        """Return the value that drops the condition of an ``if`` whose statement begins at
        ``start``.
        """
        block = self.tokens[start].text == "{"
        last, end = start, self.partner.get(start, start)
        for i in self.top(start + 1, end) if block else ():
            if i == start + 1 or self.tokens[i - 1].text in (";", "}"):
                last = i
        if self.tokens[last].text in JUMPS:
            return "false"
        while not block and self.tokens[end].text not in (";", "{"):
            end = self.partner.get(end, end) + 1
        end = self.partner.get(end, end)
        return "either" if self.tokens[end + 1].text == "else" else "true"

    def top(self, start: int, end: int) -> Iterator[int]:
        """Return the tokens of [start, end) that no bracket there encloses; of brackets, the
        first.
        """
        while start < end:
            yield start
            start = self.partner.get(start, start) + 1

    def body(self, start: int, end: int) -> None:
        """Rewrite statements, or the contents of brackets, piece by piece."""
        piece = start
        at = start
        while at < end:
            text = self.tokens[at].text
            if text in ("if", "while"):
                close = self.partner[at + 1]
                self.condition(at + 2, close, self.drop(close + 1) if text == "if" else "true")
                signs = {self.tokens[i].text for i in self.top(at + 2, close)}
                if text == "if" and "&&" in signs and "||" not in signs:
                    self.wrap(at + 2, close, "false")  # the loop's body never runs
                at = piece = close + 1
                continue
            if text in ("enum", "struct") and self.tokens[at + 1].text == "{":
                at = piece = self.partner[at + 1] + 1
                continue
            if text == "?":
                self.condition(piece, at, "either")
                piece = at + 1
            elif text in ENDS:
                self.piece(piece, at)
                piece = at + 1
            elif text == "{":
                self.piece(piece, at)
                self.body(at + 1, self.partner[at])
                piece = self.partner[at] + 1
            at = self.partner.get(at, at) + 1
        self.piece(piece, end)

    def piece(self, start: int, end: int) -> None:
        """Rewrite an expression that is not a condition: its operands, and the contents of
        brackets.
        """
        if any(self.tokens[i].text in ("&&", "||") for i in self.top(start, end)):
            self.condition(start, end, "either")
        else:
            self.inside(start, end)

    def inside(self, start: int, end: int) -> None:
        """Rewrite the brackets of an expression."""
        for i in self.top(start, end):
            if i in self.partner:
                self.body(i + 1, self.partner[i])

    def condition(self, start: int, end: int, drop: str) -> None:
        """Rewrite a condition that this value drops, if it is a single one."""
        top = list(self.top(start, end))
        signs = [self.tokens[i].text for i in top]
        for sign, value in (("||", "false"), ("&&", "true")):
            if sign in signs:
                cuts = [i for i in top if self.tokens[i].text == sign]
                for a, b in zip([start, *(i + 1 for i in cuts)], [*cuts, end], strict=True):
                    self.condition(a, b, value)
                return
        bracket = start + (signs[0] == "!")
        inner = self.partner.get(bracket) == end - 1 and self.tokens[bracket].text == "("
        if inner and not {"?", ",", *ASSIGNMENTS} & {
            self.tokens[i].text for i in self.top(bracket + 1, end - 1)
        }:
            flipped = {"true": "false", "false": "true"}.get(drop, drop)
            self.condition(bracket + 1, end - 1, flipped if bracket > start else drop)
            return
        self.inside(start, end)
        if self.tokens[bracket].text == "bl_verify":
            return
        self.wrap(start, end, drop)

    def wrap(self, start: int, end: int, drop: str) -> None:
        """Write a BL_CONDITION() around these tokens, outside of existing ones."""
        name = self.text(start, end)
        self.before[start] = f'BL_CONDITION("{drop}|{name}", ' + self.before.get(start, "")
        self.after[end - 1] = self.after.get(end - 1, 0) + 1


def rewritten(source: str) -> str:
    """Return C source with a BL_CONDITION() around each condition."""
    return Rewriter(source).rewritten()


def _stamp() -> str:
    own = Path(__file__).read_bytes()
    return hashlib.sha256(build_sim.digest().encode() + own).hexdigest()[:16]


def build() -> ModuleType:
    """Build the simulator with all conditions as sites, unless such a build exists."""
    folder = BUILD / _stamp()
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for old in BUILD.glob("????????????????"):
            shutil.rmtree(old, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=BUILD))
        shutil.copytree(CSRC, part / "csrc")
        for name in PROTOCOL:
            path = part / "csrc" / name
            path.write_text(rewritten(path.read_text()))
        made = build_sim.builder("_sim_conditions", part / "csrc")
        build_sim.compiled(made, part / "_sim_conditions.abi3.so", part)
        try:
            part.rename(folder)
        except OSError:  # another process has built it meanwhile
            shutil.rmtree(part)
    library = folder / "_sim_conditions.abi3.so"
    spec = importlib.util.spec_from_file_location("_sim_conditions", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
