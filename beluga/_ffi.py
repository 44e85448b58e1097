"""The doorway to the C core: everything in Python that calls C does it through these two names."""

from beluga._core import ffi, lib

__all__ = ["ffi", "lib"]
