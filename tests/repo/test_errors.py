# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""There is one list of errors: the enum of csrc/api/error.h, the exceptions, and the tree above
them.
"""

import errno
import inspect
import re
from pathlib import Path

import pytest

from beluga import errors

ROOT = Path(__file__).resolve().parents[2]

# This is frozen: a number means the same forever, since it crosses the pool between programs.
NUMBERS = {
    "BL_ERROR_FORKED": (1001, errors.ForkedSessionError),
    "BL_ERROR_NO_SERVER": (1002, errors.NoServerError),
    "BL_ERROR_TIMEOUT": (1003, errors.CallTimeoutError),
    "BL_ERROR_DEPOSED": (1004, errors.DeposedError),
    "BL_ERROR_SERVER_ALIVE": (1005, errors.ServerAliveError),
    "BL_ERROR_HOST_CLASH": (1006, errors.HostClashError),
    "BL_ERROR_NO_LANE": (1007, errors.NoLaneError),
    "BL_ERROR_SESSION_LOST": (1008, errors.SessionLostError),
    "BL_ERROR_NO_METHOD": (1009, errors.NoMethodError),
    "BL_ERROR_BAD_REQUEST": (1010, errors.BadRequestError),
    "BL_ERROR_BAD_REPLY": (1011, errors.BadReplyError),
    "BL_ERROR_HANDLER": (1012, errors.HandlerError),
    "BL_ERROR_NO_SPACE": (1013, errors.NoSpaceError),
    "BL_ERROR_TABLE_FULL": (1014, errors.TableFullError),
    "BL_ERROR_TOO_LARGE": (1015, errors.TooLargeError),
    "BL_ERROR_NO_GRANT": (1016, errors.NoGrantError),
    "BL_ERROR_PIN_LIMIT": (1017, errors.PinLimitError),
    "BL_ERROR_QUARANTINE": (1018, errors.QuarantineError),
    "BL_ERROR_EPOCH_DAMAGED": (1019, errors.EpochDamagedError),
    "BL_ERROR_SECOND_HOST": (1020, errors.SecondHostError),
    "BL_ERROR_LOBBY_BUSY": (1021, errors.LobbyBusyError),
    "BL_ERROR_QUOTA": (1022, errors.QuotaError),
    "BL_ERROR_DEVICE_FAULT": (1023, errors.DeviceFaultError),
    "BL_ERROR_QUEUE_FULL": (1024, errors.QueueFullError),
    "BL_ERROR_SESSION_ALIVE": (1025, errors.SessionAliveError),
    "BL_ERROR_RUNTIME_DIR": (1026, errors.RuntimeDirError),
    "BL_ERROR_OFFLOADING": (1027, errors.OffloadingError),
    "BL_ERROR_CACHE_LINE": (1028, errors.CacheLineError),
    "BL_ERROR_DRAINING": (1029, errors.DrainingError),
    "BL_ERROR_REMOVALS_FULL": (1030, errors.RemovalsFullError),
    "BL_ERROR_NO_ROOM": (1031, errors.NoRoomError),
    "BL_ERROR_CLOSED": (1032, errors.RpcError),
}


def header_numbers() -> dict[str, int]:
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc/api/error.h").read_text(), flags=re.DOTALL)
    body = re.search(r"enum bl_error \{(.*?)\}", text, flags=re.DOTALL)
    assert body
    numbers: dict[str, int] = {}
    following = 0
    for name, value in re.findall(r"(BL_ERROR_\w+)(?:\s*=\s*(\d+))?", body[1]):
        following = int(value) if value else following
        numbers[name] = following
        following += 1
    return numbers


def test_numbers_of_c_and_python_agree() -> None:
    assert header_numbers() == {name: number for name, (number, _) in NUMBERS.items()}
    assert errors.FIRST_CODE == 1001
    assert [kind for kind, _ in errors.CODES] == [kind for _, kind in NUMBERS.values()]


@pytest.mark.parametrize(("number", "kind"), NUMBERS.values(), ids=NUMBERS)
def test_check_raises_the_exception_of_the_number(
    number: int, kind: type[errors.BelugaError]
) -> None:
    with pytest.raises(kind, match=r"^reading the tea leaves: ") as caught:
        errors.raise_for_status(-number, "reading the tea leaves")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_check_raises_oserror_for_an_errno() -> None:
    with pytest.raises(PermissionError, match="mapping: ") as caught:
        errors.raise_for_status(-errno.EACCES, "mapping")
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("result", [0, 1, 4096])
def test_check_returns_results(result: int) -> None:
    assert errors.raise_for_status(result) == result


def test_unknown_codes_raise() -> None:
    with pytest.raises(OSError, match=r"\d"):
        errors.raise_for_status(-(errors.FIRST_CODE + len(errors.CODES)))


def drawn_tree() -> list[tuple[int, str]]:
    """Return (depth, name) of every line of the tree at the top of errors.py."""
    lines = (errors.__doc__ or "").splitlines()
    return [
        (len(match[1]) // 4, match[2])
        for line in lines
        if (match := re.match(r"^([ │├└─]*)(\w+Error)\b", line))
    ]


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    path: list[str] = []
    drawn = {}
    for depth, name in drawn_tree():
        path[depth:] = [name]
        drawn[name] = path[depth - 1] if depth else "Exception"
    classes = {
        name: kind.__bases__[0].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.BelugaError)
    }
    assert drawn == classes


def test_each_error_class_has_advice() -> None:
    for _, name in drawn_tree():
        text = vars(getattr(errors, name))["__doc__"] or ""
        assert re.fullmatch(r"[A-Z].+\.", text, re.DOTALL), name


def test_an_unknown_error_number_is_an_error_too() -> None:
    with pytest.raises(OSError):
        errors.raise_for_status(-(1 << 31))
