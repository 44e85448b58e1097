# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The public API: its page, its types as mypy sees them, and wrong types at every entry."""

import contextlib
import copy
import dataclasses
import importlib
import inspect
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from docs_pages import INTERNAL
from support.commands import captured
from support.shown import PAGES, ROOT, blocks
from test_exports import EXPORTS
from test_shown import GIVEN

import beluga
from beluga import Client, IndexServer, KVCache, Namespace, Pool, errors
from beluga.errors import BadTypeError, BelugaError, GreenThreadsError, NoServerError
from beluga.kvcache import hash_keys
from beluga.pool import DeviceSpec
from beluga.rpc import Quota
from beluga.threads import Thread

# ---- Type checkers see the C core and the public interface: stubs, mistakes found, no Any.


# The names that cannot be given a type, each with its reason.
ANY_ALLOWED: dict[str, str] = {}

SPECIAL = ("__call__", "__enter__", "__iter__", "__len__")  # public methods nevertheless

# A line of Python, and a part of mypy's message for it, or None if it is correct.
LINES = {
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 64)': None,
    'lib.bl_flush(ffi.new("uint64_t[]", 8))': 'Too few arguments for "bl_flush"',
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 64, 1)': 'Too many arguments for "bl_flush"',
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 6.4)': 'incompatible type "float"; expected "int"',
    "lib.bl_flsh(ffi.NULL, 64)": '"Lib" has no attribute "bl_flsh"',
    "lib.BL_ERROR_TIMEDOUT": '"Lib" has no attribute "BL_ERROR_TIMEDOUT"',
    "lib.BL_ERROR_TIMEOUT = 3": 'final attribute "BL_ERROR_TIMEOUT"',
    'ffi.new("bl_session_stat *").nonce + 1': None,
    'ffi.new("bl_session_stat *").nunce': '"bl_session_stat" has no attribute "nunce"',
    'ffi.new("bl_session_stat *").nonce.hex()': '"int" has no attribute "hex"',
    'ffi.new("bl_sesion_stat *")': "No overload variant",
    'ffi.new("bl_quota *", {"pin_count": 1})': None,
    'ffi.new("bl_quota *", {"pins": 1})': "No overload variant",
    "beluga.KVCash": 'has no attribute "KVCash"',
    'lib.bl_session_free(ffi.new("bl_session **")[0])': None,
    'lib.bl_session_free(ffi.new("bl_server **")[0])': 'expected "bl_session | Null"',
    'lib.bl_tier_touch(ffi.new("bl_tier **")[0], ffi.new("uint64_t[]", 1), 1)': (
        'incompatible type "uint64_p"; expected "uint32_p'
    ),
}


def attributes(cls: type) -> set[str]:
    """Return the attributes of an object of one of our classes."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "beluga":
            names |= {*vars(base), *vars(base).get("__annotations__", ())}
            if "__init__" in vars(base) and not dataclasses.is_dataclass(base):
                made = inspect.getsource(base.__init__)
                names |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)?(?:, self\.\w+)* = ", made))
    return {each for each in names if not each.startswith("_") or each in SPECIAL}


def own_names(module: ModuleType) -> list[str]:
    """Return the names that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def public(module: ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Return an expression for each of the names, and its members."""
    for name in names:
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield from public(value, own_names(value))
            continue
        yield path
        if inspect.isclass(value):
            items = len(getattr(value, "__parameters__", ()))
            kind = f"{path}[{', '.join(['object'] * items)}]" if items else path
            yield from (f"instance({kind}).{each}" for each in sorted(attributes(value)))


def all_public() -> list[str]:
    """Return expressions for everything that users may import."""
    modules = [importlib.import_module(name) for name in EXPORTS if name != "beluga._ffi"]
    paths = [path for module in modules for path in public(module, module.__all__)]
    return [*paths, *public(errors, own_names(errors))]


# Any in numpy's own types, in a coroutine's yield and send types, and for arbitrary parameters.
UNTYPED = (
    r"ndarray\[(tuple\[Any, \.\.\.\]|Any), |numpy\.generic\[Any\]"
    r"|_SupportsArray\[numpy\.dtype\[Any\]\]|Coroutine\[Any, Any, |def \(\*Any, \*\*Any\)"
)


def has_any(shown: str) -> bool:
    """Whether a type as printed by mypy contains Any."""
    return re.search(r"\bAny\b", re.sub(UNTYPED, "", shown)) is not None


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return mypy's messages for each line: its errors, or the revealed type."""
    lines = [*LINES, *(f"reveal_type({path})" for path in all_public())]
    head = [
        "from beluga._ffi import ffi, lib",
        *(f"import {name}" for name in [*EXPORTS, "beluga.errors"]),
        "from typing import TypeVar",
        "T = TypeVar('T')",
        "def instance(kind: type[T]) -> T: ...",
    ]
    file = tmp_path_factory.mktemp("typing") / "checked.py"
    file.write_text("\n".join([*head, *lines]) + "\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", file]
    run = captured(command, cwd=ROOT)
    found = dict.fromkeys(lines, "")
    for line in run.stdout.splitlines():
        where, _, text = line.partition(": ")
        name, _, number = where.rpartition(":")
        if name.endswith(file.name) and int(number) > len(head):
            found[lines[int(number) - len(head) - 1]] += text + "\n"
    return found


def test_a_program_outside_the_checkout_sees_the_types(tmp_path: Path) -> None:
    """scripts/dev/setup-env lets type checkers find the editable installation."""
    file = tmp_path / "program.py"
    file.write_text("import beluga\n\nreveal_type(beluga.Pool.open)\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--strict", file]
    run = captured(command, cwd=tmp_path)
    assert "-> beluga.pool.pool.Pool" in run.stdout, run.stdout
    assert "error" not in run.stdout


@pytest.mark.parametrize(
    ("stub", "extension"),
    [("beluga/_core.pyi", "beluga._core"), ("bench/_limit.pyi", "beluga_bench._limit")],
)
def test_stubs_name_what_the_extensions_have(stub: str, extension: str) -> None:
    """The stubs are generated from the headers that were compiled."""
    text = (ROOT / stub).read_text()
    body = text[text.index("\nclass Lib:") : text.index("\nffi: ")]
    named = set(re.findall(r"^    (?:def )?(\w+)[:(]", body, flags=re.MULTILINE))
    there = set(dir(importlib.import_module(extension).lib))
    assert named == there - {"bl_figures"}


@pytest.mark.parametrize("line", LINES)
def test_mistakes_at_the_boundary_are_found(line: str, reported: dict[str, str]) -> None:
    complaint = LINES[line]
    if complaint is None:
        assert reported[line] == ""
    else:
        assert complaint in reported[line]


def test_public_signatures_have_no_any(reported: dict[str, str]) -> None:
    shown = {path: reported[f"reveal_type({path})"] for path in all_public()}
    assert [path for path, text in shown.items() if "Revealed type" not in text] == []
    found = {path: text for path, text in shown.items() if has_any(text)}
    assert "".join(f"{path}: {found[path]}" for path in found if path not in ANY_ALLOWED) == ""
    assert set(ANY_ALLOWED) <= set(found)


def test_an_any_is_detected() -> None:
    assert has_any("def (x: builtins.dict[builtins.str, Any]) -> None")
    assert has_any("numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]")
    assert not has_any("numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.void]]")


# ---- The page of the Python API has all names and an example for each subject, and its
# examples, like the Python of the other pages, pass mypy --strict. tests/repo/test_shown.py runs
# them.


PAGE = ROOT / "docs/reference/api.md"
NAME = re.compile(r"^\| `((beluga[\w.]*)\.(\w+))` \|", re.MULTILINE)
NAMES = {
    path: getattr(importlib.import_module(module), name)
    for path, module, name in NAME.findall(PAGE.read_text(encoding="utf-8"))
}
# Pages whose Python shows internals and is not a complete program.
PARTS = {"copy-engines.md"}


def test_every_name_of_the_page_is_public_and_every_name_of_the_package_is_on_it() -> None:
    assert {f"beluga.{name}" for name in beluga.__all__} - {"beluga.BelugaError"} <= set(NAMES)
    modules = {path.rpartition(".")[0] for path in NAMES}
    assert modules <= {
        *EXPORTS,
        "beluga.connectors.settings",
        "beluga.connectors.vllm.settings",
        "beluga.transfer.arrangements",
    }


def test_every_name_and_every_public_member_has_a_docstring() -> None:
    bare = []
    for path, value in NAMES.items():
        members = vars(value) if inspect.isclass(value) else {}
        hidden = INTERNAL.get(path.rpartition(".")[2], "").split()
        described = {path: value} | {
            f"{path}.{name}": getattr(member, "__func__", member)
            for name, member in members.items()
            if not name.startswith("_") and name not in hidden
        }
        bare += [
            name
            for name, each in described.items()
            if (inspect.isclass(each) or inspect.isroutine(each) or isinstance(each, property))
            and not each.__doc__
        ]
    assert bare == []


def test_internal_members_exist() -> None:
    classes = {path.rpartition(".")[2]: value for path, value in NAMES.items()}
    lacking = [
        (name, member)
        for name, members in INTERNAL.items()
        for member in members.split()
        if not hasattr(classes[name], member)
    ]
    assert lacking == []


def test_every_subject_has_an_example() -> None:
    _, *subjects = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(subjects) > 8
    assert [each.splitlines()[0] for each in subjects if "```python\n" not in each] == []


def test_an_example_of_forty_lines_shows_all_subjects() -> None:
    text = next(block.text for block in blocks(PAGE) if block.language == "python")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40
    needed = ("Pool", "IndexServer", "torch", "np.", "Handlers", "Run.of", "Router")
    assert [name for name in needed if name not in text] == []


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return mypy's errors for the Python of all pages, as a program that uses the installed
    package.
    """
    folder = tmp_path_factory.mktemp("shown")
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            if block.language != "python" or page.name in PARTS:
                continue
            named = re.match(r"# (\w+\.py)\n", block.text)
            name = named[1] if named else f"{page.stem.replace('-', '_')}_{number}.py"
            (folder / name).write_text(GIVEN.get(page.name, "") + block.text)
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        "[mypy-torch]\nignore_missing_imports = true\n"  # torch is optional
    )
    ended = captured(
        [sys.executable, "-m", "mypy", "--no-error-summary", "."],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert len(list(Path(folder).glob("*.py"))) > 15
    return ended.stdout + ended.stderr


@pytest.mark.long
def test_documented_programs_pass_mypy_strict(checked: str) -> None:
    assert checked == ""


# ---- Values of wrong types at every entry of the public API: a typed error in one line, and
# objects that cannot leave their process.


WRONG: list[Any] = [
    *(None, 3, -1, 2.5, 10**30, float("nan"), True, "text", b"bytes", object(), lambda *_: 0),
    *([None], ["text"], [3], [b""], [[]], {}, {"a": 1}, (), {3: 1}),
    *(np.zeros(3), np.zeros((2, 2)), np.int64(5), np.zeros(0, object)),
]
KEYS = [b"k" * 16, b"l" * 16]
ROWS = np.ones((2, 64), np.uint8)


@pytest.fixture(scope="module")
def folder(memory_root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool.create([folder / "a"], device_size=16 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def cache(pool: Pool) -> Iterator[KVCache]:
    with IndexServer(pool), KVCache(pool, namespace="x") as made:
        made.put(KEYS, ROWS)
        yield made


def calls(pool: Pool, cache: KVCache, folder: Path) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "put keys", lambda wrong: cache.put(wrong, ROWS)
    yield "put sources", lambda wrong: cache.put(KEYS, wrong)
    yield "put a source", lambda wrong: cache.put(KEYS, [wrong, wrong])
    yield "get keys", lambda wrong: cache.get(wrong, ROWS.copy())
    yield "get targets", lambda wrong: cache.get(KEYS, wrong)
    yield "get tokens", lambda wrong: cache.get_tokens(KEYS, [[0, 0]], wrong)
    yield "onboard for", lambda wrong: cache.onboard(KEYS, wait_s=wrong)
    for name in ("lookup", "remove", "keys", "onboard"):
        yield name, getattr(cache, name)
    for name in ("namespace", "host", "timeout_s", "engine", "threads", "link", "chunk_size"):
        yield (
            f"cache with {name}",
            lambda wrong, name=name: KVCache(
                cache.client, **{"namespace": "x", name: wrong}
            ).close(),
        )
    yield "cache of", lambda wrong: KVCache(wrong, namespace="x")
    yield "client of", Client
    yield "client that waits", lambda wrong: Client(pool, timeout_s=wrong).close()
    yield "call number", cache.client.call
    yield "call with", lambda wrong: cache.client.call(1, wrong)
    yield "server of", IndexServer
    for name in ("host", "heartbeat_lost_s", "quota", "eviction"):
        yield (
            f"server with {name}",
            lambda wrong, name=name: IndexServer(pool, **{name: wrong}).stop(),
        )
    yield "namespace", Namespace
    yield "namespace of", Namespace.of
    yield "namespace field", lambda wrong: Namespace({"a": wrong})
    yield "salt", lambda wrong: Namespace({"a": 1}, salt=wrong)
    yield "hash_keys", hash_keys
    yield "hash_keys of", lambda wrong: hash_keys([wrong])
    yield "quota", lambda wrong: Quota(grants=wrong)
    settings = {"device_size": 16 << 20, "force": True}
    for name in set(inspect.signature(Pool.create).parameters) - {"paths", "progress"}:
        yield (
            f"pool with {name}",
            lambda wrong, name=name: Pool.create(
                [folder / "b"], **{**settings, name: wrong}
            ).close(),
        )
    yield "open", lambda wrong: Pool.open([wrong])
    yield "destroy", lambda wrong: Pool.destroy([wrong])


def test_a_value_of_a_wrong_type_is_a_typed_error_in_one_line(
    pool: Pool, cache: KVCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    untyped = []
    for name, call in calls(pool, cache, folder):
        for wrong in WRONG:
            try:
                call(wrong)
            except BelugaError as error:
                if "\n" in str(error):
                    untyped.append((name, f"{wrong!r:.30}", str(error)))
            except Exception as error:
                untyped.append((name, f"{wrong!r:.30}", repr(error)))
    assert untyped == [], untyped[:3]
    assert int(cache.lookup(KEYS)) <= 2  # the session still works


RESULTS = {"DeviceView", "PoolFile", "Reading"}  # classes of which only calls make objects


def path_parameters() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the name, the function and the parameter of each path that the public API takes."""
    for module in map(importlib.import_module, [*EXPORTS, "beluga.tiers"]):
        for name in module.__all__:
            value = getattr(module, name)
            if name in RESULTS or not getattr(value, "__module__", "").startswith("beluga"):
                continue
            functions = {name: value}
            for key, member in vars(value).items() if inspect.isclass(value) else ():
                if key[0] != "_" and inspect.isroutine(member):
                    functions[f"{name}.{key}"] = getattr(value, key)
            for path, function in functions.items():
                try:
                    parameters = inspect.signature(function).parameters.values()
                except (TypeError, ValueError):  # a type alias
                    continue
                for each in parameters:
                    if re.search(r"\b(Str)?Path(Like)?\b", str(each.annotation)):
                        yield path, function, each.name


def outcome(call: Callable[[], Any]) -> object:
    """Return the type of a call's result, or its error."""
    try:
        result = call()
        if isinstance(result, contextlib.ContextDecorator):
            with result:
                pass
        if hasattr(result, "close"):
            result.close()
    except (BelugaError, OSError) as error:
        return type(error), str(error)
    return type(result)


def test_each_path_of_the_public_api_may_be_text(pool: Pool, folder: Path) -> None:
    place = folder / "place"
    place.mkdir()
    others: dict[str, dict[str, Any]] = {
        **{key: {"directory": folder} for key in ("filesystem", "limits", "room")},
        **{key: {"path": "/"} for key in ("request", "request_any")},
        "request_json": {"path": "/", "kind": dict},
        "examine": {"spec": DeviceSpec.parse(folder / "a")},
        "scratch_folder": {"name": "x"},
        "Link": {"name": "x"},
        "host_link": {"pool": pool},
        "DiskTier": {"size": 8 << 20},
        "Admin": {"routes": {}},
        "Callers.read": {"hosts": None, "origins": None, "tls": ""},
        "write_trace": {"requests": []},
    }
    wrong, found = [], list(path_parameters())
    for name, function, parameter in found:
        call = partial(function, **{**others.get(name, {}), parameter: place})
        if (seen := outcome(call)) != outcome(partial(call, **{parameter: str(place)})):
            wrong.append((name, parameter, seen))
        for value in (3, b"x", object(), [place]):
            refused = outcome(partial(call, **{parameter: value}))
            if not isinstance(refused, tuple) or refused[0] is not BadTypeError:
                wrong.append((name, parameter, refused))
    assert wrong == []
    assert len(found) > 30


def test_numpy_integers_give_the_same_namespace() -> None:
    assert Namespace({"tp": np.int64(2)}).digest == Namespace({"tp": 2}).digest
    assert type(Namespace({"tp": np.int64(2)}).fields["tp"]) is int


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_one_process_can_be_neither_copied_nor_pickled(
    pool: Pool, cache: KVCache, way: Callable[[object], object]
) -> None:
    for one in (pool, cache, cache.client, IndexServer(pool)):
        with pytest.raises(BadTypeError, match=f"a {type(one).__name__} belongs to the process"):
            way(one)


def test_an_unstarted_server_is_reported(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=16 << 20) as pool:
        server = IndexServer(pool)
        with pytest.raises(NoServerError, match=r"IndexServer that this process made .* start"):
            KVCache(pool, namespace="x")
        server.stop()
        with pytest.raises(NoServerError, match="start one with 'beluga serve'"):
            KVCache(pool, namespace="x")


@pytest.mark.parametrize("arguments", [["--help"], ["size", "--help"], ["--version"]])
def test_the_package_runs_as_a_module(arguments: list[str]) -> None:
    as_module = [sys.executable, "-m", "beluga", *arguments]
    ran = captured(as_module)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "beluga" in ran.stdout


def test_threads_that_are_greenlets_are_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_ident() -> int:
        return 1

    get_ident.__module__ = "gevent.thread"
    with Pool.create([shm / "a"], device_size=16 << 20) as pool, monkeypatch.context() as patched:
        server = IndexServer(pool)
        patched.setattr("threading.get_ident", get_ident)
        with pytest.raises(GreenThreadsError, match=r"gevent makes greenlets .*beluga serve"):
            server.start()
        with pytest.raises(GreenThreadsError):
            Thread(target=print).start()
        patched.undo()
        server.start()  # the failed start allocated nothing
        server.stop()


@pytest.mark.parametrize(
    ("library", "patch"),
    [("gevent.monkey", "patch_all()"), ("eventlet", "monkey_patch()")],
)
def test_a_server_with_patched_threading_raises(shm: Path, library: str, patch: str) -> None:
    pytest.importorskip(library)
    program = (
        f"import {library}; {library}.{patch}\n"
        "from beluga import IndexServer, Pool\n"
        "from beluga.errors import GreenThreadsError\n"
        f"with Pool.create([{str(shm / 'a')!r}], device_size=16 << 20) as pool:\n"
        "    try:\n"
        "        with IndexServer(pool): pass\n"
        "    except GreenThreadsError as error: print('refused', error)\n"
    )
    ran = captured([sys.executable, "-W", "ignore", "-c", program], timeout=60)
    assert ran.stdout.startswith(f"refused {library.partition('.')[0]}"), ran.stderr


def test_only_one_module_starts_threads() -> None:
    folder = Path(inspect.getfile(Pool)).parent.parent
    found = [
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "threading.Thread(" in path.read_text()
    ]
    assert found == []


def test_a_block_with_an_object_has_an_object_of_its_own_class() -> None:
    """A type checker gave ``with IndexServer(pool) as server`` the type of its base class."""
    entries = [
        (value, vars(value)[name])
        for value in NAMES.values()
        for name in ("__enter__", "__aenter__")
        if inspect.isclass(value) and name in vars(value)
    ]
    assert len(entries) >= 4
    wrong = [value for value, enter in entries if enter.__annotations__["return"] != "Self"]
    assert wrong == []
