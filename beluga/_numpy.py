# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``np`` is numpy, imported on first use: commands that only make calls start without it.

Type checkers need ``import numpy as np`` under ``TYPE_CHECKING`` instead.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


class _Numpy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        import numpy as np

        value = getattr(np, name)
        setattr(self, name, value)  # further accesses do not come here
        return value


np = _Numpy("numpy")
