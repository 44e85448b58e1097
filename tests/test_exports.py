"""What users may import, frozen: adding or removing a public name takes an edit here."""

from __future__ import annotations

import importlib

import pytest

EXPORTS: dict[str, set[str]] = {
    "beluga._ffi": {"ffi", "lib"},
    "beluga.primitives": {
        "crc32c",
        "features",
        "fence",
        "flush",
        "invalidate",
        "isa",
        "ntstore_copy",
    },
}


@pytest.mark.parametrize("module", EXPORTS)
def test_public_names_are_pinned(module: str) -> None:
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == EXPORTS[module]
    assert all(hasattr(loaded, name) for name in loaded.__all__)
