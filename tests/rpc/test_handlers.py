# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Handlers: functions of a program that clients call by name, with types, on threads other than the
poll loop's.
"""

import contextlib
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from other_machine import BULK, LANES
from support.blocks import eventually
from support.emulation import fewer
from support.forks import in_child

from beluga import Client, Handlers, IndexServer, Pool, Server
from beluga._ffi import ffi, lib
from beluga.errors import (
    BadRequestError,
    BadTypeError,
    BadValueError,
    BelugaError,
    CallTimeoutError,
    ForkedSessionError,
    HandlerError,
    NoMethodError,
    QuotaError,
    RpcError,
)
from beluga.rpc import Quota, read_trace
from beluga.rpc import messages as parts
from beluga.rpc.handlers import converted, name_of, refuse_type
from beluga.rpc.messages import pack, unpack

FUNCTION = int(lib.BL_METHOD_FUNCTION)


@dataclass
class Point:
    x: int
    y: float = 0.0


@dataclass
class Line:
    points: list[Point]
    name: str | None = None
    marks: dict[str, bytes] = field(default_factory=dict)


def echo(value: object) -> object:
    return value


def twice(line: Line) -> Line:
    return Line(line.points * 2, line.name, line.marks)


def scale(values: NDArray[np.float32], by: float = 2.0) -> NDArray[np.float32]:
    """Multiply. More text."""
    return values * np.float32(by)


def total(values: np.ndarray) -> float:  # type: ignore[type-arg]
    return values.sum()  # type: ignore[no-any-return]


def pair(a: int, b: tuple[str, ...] = ()) -> tuple[int, str]:
    return a, "".join(b)


def fails(how: str) -> int:
    if how == "exit":
        sys.exit(3)
    if how == "type":
        return "text"  # type: ignore[return-value]
    if how == "bad":
        raise BadTypeError("raised by the handler")
    raise ValueError("two\nlines")


def length(data: bytes) -> int:
    return len(data)


def filled(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + bytes(range(size % 256))


PLAIN = Handlers(echo, twice, scale, total, pair, fails, length, filled)


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    with Server(pool) as server, Client(pool) as client:
        server.register(PLAIN)
        yield client


class Held:
    """A handler that waits until the test releases it."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Semaphore(0), threading.Event()

    def hold(self, word: str) -> str:
        self.entered.release()
        assert self.go.wait(60)
        return word


def on_thread(client: Client, word: str, answers: list[object]) -> threading.Thread:
    def call() -> None:
        try:
            answers.append(client.call("hold", word, timeout_s=60))
        except BelugaError as error:
            answers.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(1 << 70), 1.5, float("inf"), "", "Grüße \U0001f40b", b"", b"\0\xff"),
        *([], [1, [2.5, ["x", None]]], {}, {"a": {"b": b"c"}}),
        *(np.float32(2.5), np.int64(7)),
    ],
    ids=repr,
)
def test_a_value_is_returned_unchanged(client: Client, value: object) -> None:
    result = client.call("echo", value)
    assert result == value
    assert type(result) is type(value) or isinstance(value, np.generic)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(10)[::3],
        np.array(3.5, np.float16),
        np.zeros((0, 5), np.complex64),
        np.array([True, False]),
        np.arange(4, dtype=">u8"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_is_returned_unchanged(client: Client, array: NDArray[np.generic]) -> None:
    result = client.call("echo", array, returns=np.ndarray)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(result, array)
    result += result.dtype.type(1)  # the array belongs to the caller


def test_nan_is_returned_unchanged(client: Client) -> None:
    result = client.call("echo", float("nan"), returns=float)
    assert math.isnan(result)


def test_a_dataclass_is_rebuilt_on_both_sides(client: Client) -> None:
    line = Line([Point(1, 2.5), Point(3)], "a", {"m": b"\1"})
    assert client.remote(twice)(line) == twice(line)
    assert client.call("twice", line, returns=Line) == twice(line)
    assert client.call("twice", {"points": [{"x": 1}]}, returns=Line) == Line([Point(1)] * 2)


def test_a_remote_function_has_the_functions_parameters(client: Client) -> None:
    values = np.ones(3, np.float32)
    np.testing.assert_array_equal(client.remote(scale)(values, by=4), values * 4)
    np.testing.assert_array_equal(client.remote(scale)(values), values * 2)
    assert client.remote(pair)(1, ("a", "b")) == (1, "ab")
    assert client.call("total", np.full(3, 2, np.uint8), returns=float) == 6.0
    assert client.call("pair", 1, ["x"], returns=tuple[int, str]) == (1, "x")


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (("nothing",), NoMethodError, "no handler 'nothing'; it has echo, fails, filled"),
        (("length", 3), BadTypeError, "length: data is 3; give bytes"),
        (("length",), BadTypeError, r"missing a required argument.*length\(data: bytes\) -> int"),
        (("length", b"", b""), BadTypeError, "too many positional"),
        (("scale", np.ones(2)), BadTypeError, r"give numpy.ndarray\[float32\]"),
        (("pair", True), BadTypeError, "pair: a is True; give int"),
        (("twice", {"points": [{"z": 1}]}), BadTypeError, "no field 'z'; Point has x, y"),
        (("twice", {"points": [{"y": 1}]}), BadTypeError, r"line.points\[0\] is not a valid Point"),
        (("echo", {1, 2}), BadTypeError, "a type that cannot be sent"),
        (("echo", np.array([None])), BadTypeError, "an array of object cannot be sent"),
        (("echo", {1: 2}), BadTypeError, "give a dict of str"),
        (("fails", "raise"), HandlerError, "fails raised ValueError: two lines; see the server"),
        (("fails", "exit"), HandlerError, "fails raised SystemExit: 3"),
        (("fails", "bad"), HandlerError, "fails raised BadTypeError: raised by the handler"),
        (("fails", "type"), HandlerError, "the result of fails is 'text'; give int"),
    ],
)
def test_a_failed_call_raises_one_line_and_the_server_continues(
    client: Client, call: tuple[str, object], kind: type[BelugaError], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        client.call(*call)
    assert "\n" not in str(raised.value)
    assert client.call("length", b"next") == 4


def test_a_recursive_list_is_rejected(client: Client) -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(BadTypeError, match="nests lists"):
        client.call("echo", endless)


def test_a_result_is_checked_by_the_caller(client: Client) -> None:
    with pytest.raises(BadTypeError, match="the result of echo is 'text'; give int"):
        client.call("echo", "text", returns=int)


ROOM = BULK - 24  # bytes of a message in one call


@pytest.mark.parametrize("size", [0, 1, ROOM // 2, *range(ROOM - 140, ROOM + 20, 7), 10 * BULK + 3])
def test_messages_of_any_size_pass_in_both_directions(client: Client, size: int) -> None:
    assert client.call("length", bytes(size)) == size
    assert client.call("filled", size) == filled(size)


def test_a_message_above_the_bound_is_refused_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MESSAGE_MAX", 1000)
    with pytest.raises(BadRequestError, match="at most 1000"):
        client.call("length", bytes(2000))


def test_the_server_bounds_incomplete_calls(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_HELD_MAX", BULK)
    with pytest.raises(QuotaError):
        client.call("length", bytes(10 * BULK))
    assert client.call("length", bytes(BULK // 2)) == BULK // 2


def test_space_of_an_incomplete_message_is_reused(
    pool: Pool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_HELD_MAX", 3 * BULK)
    begun = parts._HEAD.pack(parts.SEND, 1, 0, 5 * BULK) + bytes(ROOM)
    clients = [Client(pool) for _ in range(2)]
    for sender in clients:
        sender.call(FUNCTION, begun)
    with pytest.raises(QuotaError):
        client.call("length", bytes(3 * BULK))
    with monkeypatch.context() as patched:
        patched.setattr(parts, "_IDLE_S", -1.0)
        assert client.call("length", bytes(2 * BULK)) == 2 * BULK
    for sender in clients:
        sender.call(FUNCTION, begun)
    for sender in clients:  # the end of a session frees its message
        sender.close()

    def fits() -> bool:
        with contextlib.suppress(QuotaError):
            return bool(client.call("length", bytes(2 * BULK)))
        return False

    assert eventually(fits)


def test_no_session_takes_all_space_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_HELD_MAX", 1000)
    monkeypatch.setattr(parts, "_SHARE", 100)
    assembly = parts.Assembly(bytearray, 500)

    def begin(lane: int, size: int) -> None:
        head = parts._HEAD.pack(parts.SEND, 1, 0, 2 * size)
        assembly.answer(lane, lane, bytearray(head + bytes(size)))

    begin(1, 500)
    with pytest.raises(QuotaError, match="leave 250 bytes to this one"):
        begin(2, 251)
    begin(2, 250)
    begin(3, 125)
    begin(4, 100)
    with pytest.raises(QuotaError, match="leave 25 bytes"):
        begin(5, 26)
    assembly.forget(1, 1)
    begin(1, 250)  # the ended session sends more, which nobody fetches
    assert set(assembly._held) == {2, 3, 4}


def test_a_part_without_its_predecessors_is_resent(client: Client) -> None:
    for kind, at in ((parts.SEND, 100), (parts.MORE, 0)):
        reply = client.call(FUNCTION, parts._HEAD.pack(kind, 9, at, 200) + b"x")
        assert parts._HEAD.unpack(reply) == (parts.AGAIN, 9, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        b"",
        b"short",
        parts._HEAD.pack(77, 1, 0, 0),
        parts._HEAD.pack(parts.SEND, 1, 0, 1 << 40) + b"x",
        parts._HEAD.pack(parts.SEND, 1, (1 << 64) - 1, 1) + b"x",
        parts._HEAD.pack(parts.SEND, 1, 0, 1) + b"xx",
    ],
)
def test_a_call_outside_of_a_message_is_rejected(client: Client, call: bytes) -> None:
    with pytest.raises(BadRequestError):
        client.call(FUNCTION, call)
    assert client.call("length", b"ab") == 2


def test_a_slow_handler_delays_neither_the_index_nor_other_handlers(pool: Pool) -> None:
    held, answers = Held(), list[object]()
    with IndexServer(pool) as server, Client(pool) as slow, Client(pool) as other:
        server.register(Handlers(held.hold, length), threads=2)
        thread = on_thread(slow, "a", answers)
        assert held.entered.acquire(timeout=60)
        for _ in range(100):
            other.ping()
        assert other.call("length", b"abc") == 3
        assert answers == []
        held.go.set()
        thread.join()
    assert answers == ["a"]


def test_calls_wait_for_a_free_thread_in_their_order(pool: Pool) -> None:
    held, answers = Held(), list[object]()
    with Server(pool) as server:
        server.register(Handlers(held.hold))
        clients = [Client(pool) for _ in range(3)]
        threads = []
        for number, caller in enumerate(clients):
            threads.append(on_thread(caller, str(number), answers))
            if number == 0:
                assert held.entered.acquire(timeout=60)
        held.go.set()
        for thread in threads:
            thread.join()
        assert sorted(map(str, answers)) == ["0", "1", "2"]
        for caller in clients:
            caller.close()


def test_the_reply_to_a_detached_caller_is_dropped(pool: Pool) -> None:
    held = Held()
    with Server(pool) as server, Client(pool) as client:
        server.register(Handlers(held.hold, length))
        calls = LANES + lib.BL_FUNCTION_THREADS_MAX + 2  # more than a server's jobs
        for _ in range(calls):
            with pytest.raises(CallTimeoutError, match="calling the handler hold"):
                client.call("hold", "late", timeout_s=0.01)
        held.go.set()
        for size in range(20):
            assert client.call("length", bytes(size)) == size
        assert client.stat().reattach_count <= calls


def test_a_running_handler_does_not_delay_the_stop_of_its_server(pool: Pool) -> None:
    held, answers = Held(), list[object]()
    first = Server(pool)
    first.register(Handlers(held.hold))
    first.start()
    with Client(pool) as client:
        thread = on_thread(client, "a", answers)
        assert held.entered.acquire(timeout=60)
        first.stop()
        second = Server(pool)
        second.register(Handlers(held.hold))
        second.start()  # the client makes another call
        assert held.entered.acquire(timeout=60)
        held.go.set()
        thread.join()
        assert answers == ["a"]
        second.stop()


def test_a_handler_may_stop_its_server(pool: Pool) -> None:
    server = Server(pool)
    server.register(Handlers(server.stop))
    server.start()
    with Client(pool) as client, pytest.raises(RpcError):
        client.call("stop", timeout_s=0.2)
    assert threading.active_count() >= 1
    with Server(pool):
        pass


def test_threads_share_a_client(client: Client) -> None:
    def call(size: int) -> None:
        assert client.call("filled", size) == filled(size)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, [n * 1000 + turn * 777 for turn in range(20) for n in range(8)]))


def test_concurrent_sessions_get_their_own_results(pool: Pool) -> None:
    def call(number: int) -> None:
        with Client(pool) as client:
            for turn in range(30):
                size = number * 5000 + turn * 333
                assert client.call("filled", size, timeout_s=60) == filled(size)

    with Server(pool) as server, ThreadPoolExecutor(4) as threads:
        server.register(PLAIN, threads=4)
        list(threads.map(call, range(4)))


def test_requests_wait_for_an_earlier_one_on_a_thread(client: Client) -> None:
    """Replies of a lane are in order, whichever thread makes them."""
    size, count = 32, 100
    heads = [parts._HEAD.pack(parts.MORE, number, 0, 0) for number in range(count)]
    replies = ffi.new("uint8_t[]", size * count)
    requests = ffi.from_buffer("uint8_t[]", b"".join(head.ljust(size) for head in heads))
    pump = ffi.new("bl_pump *", {"requests": requests, "replies": replies, "count": count})
    pump.size, pump.depth, pump.method = size, 8, FUNCTION
    assert lib.bl_session_pump(client.session, pump, 20 * 10**9) == 0
    content = bytes(ffi.buffer(replies))
    numbers = [parts._HEAD.unpack_from(content, at * size)[1] for at in range(count)]
    assert numbers == list(range(count))


def test_the_quota_of_calls_counts_handlers(pool: Pool) -> None:
    with Server(pool, quota=Quota(calls_per_s=1)) as server, Client(pool) as client:
        server.register(PLAIN)
        with pytest.raises(QuotaError):
            for _ in range(50):
                client.call("length", b"")


def test_the_trace_has_the_duration_of_a_handler(pool: Pool) -> None:
    held, answers = Held(), list[object]()
    with Server(pool) as server, Client(pool) as client, Client(pool) as other:
        server.register(Handlers(held.hold))
        thread = on_thread(client, "a", answers)
        assert held.entered.acquire(timeout=60)
        other.ping()
        held.go.set()
        thread.join()
        ping, function = read_trace(pool.runtime_dir).calls()
        assert (ping.method, function.method) == ("ping", "function")
        assert ping.seconds is not None
        assert function.seconds is not None
        assert function.seconds > ping.seconds
        assert function.nonce == f"{client.stat().nonce:016x}"
        assert server.calls()["function"].calls == 1


def test_handlers_are_described(client: Client) -> None:
    described = {handler.name: handler for handler in client.handlers()}
    names = ["echo", "twice", "scale", "total", "pair", "fails", "length", "filled"]
    assert list(described) == sorted(names)
    assert str(described["scale"]) == (
        "scale(values: numpy.ndarray[float32], by: float = ...) -> numpy.ndarray[float32]"
    )
    assert described["scale"].help == "Multiply. More text."
    assert str(described["pair"]) == "pair(a: int, b: tuple[str, ...] = ...) -> tuple[int, str]"


def test_an_error_shows_how_to_start_a_server_with_handlers(pool: Pool) -> None:
    with Server(pool), Client(pool) as client:
        with pytest.raises(NoMethodError, match=r"no handlers.*--handlers MODULE:NAME"):
            client.call("length", b"")
        with pytest.raises(NoMethodError, match="no handlers"):
            client.handlers()


def test_a_server_has_one_set_of_handlers(pool: Pool) -> None:
    with Server(pool) as server:
        server.register(PLAIN)
        with pytest.raises(RpcError, match="handlers already"):
            server.register(PLAIN)
        for wrong in (0, 65):
            with pytest.raises(BadValueError, match="must be from 1 to 64"):
                server.register(PLAIN, threads=wrong)
        with pytest.raises(BadTypeError):
            server.register([length])  # type: ignore[arg-type]


def untyped(a, b: int) -> int:  # type: ignore[no-untyped-def]
    return b


def unreturned(a: int):  # type: ignore[no-untyped-def]
    return a


def starred(*many: int) -> int:
    return len(many)


def strange(a: set[int]) -> None:
    pass


async def later() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (untyped, "untyped has no type for 'a'; annotate it"),
        (unreturned, "no type for 'return'"),
        (starred, r"\*many; name each parameter"),
        (strange, r"set\[int\], which cannot be sent"),
        (later, "a handler must be a plain function"),
    ],
)
def test_a_function_with_unsupported_parameters_is_rejected(function: object, text: str) -> None:
    with pytest.raises(BadTypeError, match=text):
        Handlers().add(function)  # type: ignore[type-var]


def test_names_of_handlers_are_identifiers_and_unique() -> None:
    handlers = Handlers(length)
    handlers.add(length, name="other.length-2")
    assert list(handlers) == ["length", "other.length-2"]
    assert len(handlers) == 2
    for wrong in ("length", "", "a b", "x" * 101, "beluga.handlers", 3):
        with pytest.raises(BadValueError):
            handlers.add(length, name=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="not a valid name of a handler"):
        handlers.add(lambda: None)


def test_a_forked_child_creates_its_own_client(paths: list[Path], client: Client) -> None:
    assert client.call("length", b"a") == 1

    def call() -> object:
        with pytest.raises(ForkedSessionError):
            client.call("length", b"a")
        with Pool.open(paths) as opened, Client(opened) as own:
            return own.call("length", b"abc")

    assert in_child(call) == "3"
    assert client.call("length", b"ab") == 2


def test_a_request_by_number_is_a_buffer_or_text(pool: Pool) -> None:
    with Server(pool) as server, Client(pool) as client:
        server.handle(64, bytes)
        words = np.arange(6, dtype="<u2")
        for request, expected in (
            ("Grüße", "Grüße".encode()),
            (bytearray(b"ab"), b"ab"),
            (memoryview(b"abcd")[::2], b"ac"),
            (words, words.tobytes()),
            (words.reshape(2, 3).T, words.reshape(2, 3).T.tobytes()),
        ):
            assert client.call(64, request) == expected
        for wrong in (None, 3, [b"a"], np.array([None])):
            with pytest.raises(BadTypeError, match="give bytes, a buffer"):
                client.call(64, wrong)  # type: ignore[call-overload]
        with pytest.raises(BadTypeError, match="takes one request, but got 2"):
            client.call(64, b"", b"")  # type: ignore[call-overload]


SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary()),
    st.text(st.characters(exclude_categories=["Cs"])),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc"), inner, max_size=4),
)
ARRAYS = arrays(
    st.sampled_from(["?", "<i2", ">u8", "<f4", "<c16", "<f2"]),
    array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@settings(max_examples=fewer(200), deadline=None)
@given(value=VALUES, array=ARRAYS, other=ARRAYS)
def test_a_message_is_decoded_as_it_was_encoded(
    value: object, array: NDArray[np.generic], other: NDArray[np.generic]
) -> None:
    fields = unpack(pack({"value": [value], "arrays": {"a": array, "b": other.T}}))
    assert fields["value"] == [value]
    assert isinstance(fields["arrays"], dict)
    for sent, read in zip((array, other.T), fields["arrays"].values(), strict=True):
        assert (read.dtype, read.shape) == (sent.dtype, sent.shape)
        assert read.tobytes() == sent.tobytes()
        assert read.flags.aligned


@settings(max_examples=fewer(300), deadline=None)
@given(data=st.data(), value=VALUES, array=ARRAYS)
def test_a_truncated_or_changed_message_is_refused_or_decoded(
    data: st.DataObject, value: object, array: NDArray[np.generic]
) -> None:
    """Data of another process is untrusted input: it raises no other errors."""
    message = pack({"handler": "h", "arguments": [array, value, b"xyz"], "named": {}})
    for at in data.draw(st.lists(st.integers(0, len(message) - 1), max_size=3)):
        message[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRequestError):
        unpack(message[: data.draw(st.integers(0, len(message)))])


def extension(code: int, content: object) -> bytearray:
    values = msgspec.msgpack.encode({"a": parts._extended(code, content)})
    head = len(values).to_bytes(4, "little") + values
    return bytearray(head + bytes(-len(head) % 64 + 8))


@pytest.mark.parametrize(
    "message",
    [
        bytearray(),
        bytearray(b"\xff\xff\0\0" + b"\x91" * 65535),  # nested 65,535 deep
        bytearray(b"\5\0\0\0\xdd\xff\xff\xff\xff"),  # a list of 4 billion
        bytearray(b"\1\0\0\0\x90"),  # not a dictionary
        extension(1, [0, 9]),
        extension(1, [-1, 1]),
        extension(1, [(1 << 63) - 1, 2]),
        extension(1, ["0", 1]),
        extension(2, [0, 8, "O", [1]]),
        extension(2, [0, 8, "<f8", [2]]),
        extension(2, [0, 8, "<f8", [-1]]),
        extension(2, [8, 8, "<f8", [1]]),
        extension(2, [0, 8, "no dtype", [1]]),
        extension(2, [0, 8, "V8", [1]]),
        extension(2, [0, 0, "<f8", [1 << 40, 0, -1]]),
        extension(2, [0, 8, "<f8"]),
        extension(3, "12x"),
        extension(3, "9" * 5000),
        extension(9, "a"),
    ],
)
def test_a_forged_message_is_refused(message: bytearray) -> None:
    with pytest.raises(BadRequestError):
        unpack(message)


def test_a_text_with_lone_surrogates_is_refused() -> None:
    for value in ("\ud800", {"\ud800": 1}):
        with pytest.raises(BadTypeError, match="lone surrogates"):
            pack({"value": value})


typing_extensions = pytest.importorskip("typing_extensions", reason="needs TypeAliasType")

First, Second = TypeVar("First"), TypeVar("Second")
ARRAYS_OF = typing_extensions.TypeAliasType(
    "ARRAYS_OF", np.ndarray[Any, np.dtype[First]], type_params=(First,)
)
MAPS = typing_extensions.TypeAliasType(
    "MAPS", dict[Second, list[First]], type_params=(First, Second)
)
NUMBERS = typing_extensions.TypeAliasType("NUMBERS", list[float])
NESTED = typing_extensions.TypeAliasType("NESTED", NUMBERS)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ARRAYS_OF[np.float32], "numpy.ndarray[float32]"),
        (NDArray[np.float32], "numpy.ndarray[float32]"),
        (MAPS[int, str], "dict[str, list[int]]"),
        (NESTED, "list[float]"),
        (list[NESTED], "list[list[float]]"),
    ],
)
def test_an_alias_stands_for_its_type(kind: Any, name: str) -> None:
    refuse_type(kind, "value")
    assert name_of(kind) == name


def test_values_are_converted_to_the_type_of_an_alias() -> None:
    assert converted([1, 2], NESTED, "value") == [1.0, 2.0]
    assert converted([1], ARRAYS_OF[np.float32], "value").dtype == np.float32
    with pytest.raises(BadTypeError, match="give numpy"):
        converted(np.zeros(1), ARRAYS_OF[np.float32], "value")
    with pytest.raises(BadTypeError, match="cannot be sent"):
        refuse_type(MAPS[int, int], "value")
