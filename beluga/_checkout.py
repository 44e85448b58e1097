# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""If the checkout's C core is not built, import the installed Beluga instead.

In a checkout's own folder, Python finds the folder ``beluga`` before the package that ``pip
install .`` put elsewhere, and these sources cannot run without the core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def give_way() -> None:
    """Put the installed package in the place of the one that is being imported, if only the
    installed one has a C core. The import then returns it.
    """
    own = sys.modules["beluga"]
    if _has_core(own.__path__):
        return
    installed = _installed(Path(own.__path__[0]).resolve())
    if installed is None or installed.loader is None:
        return
    del sys.modules[__name__]  # the installed package has its own
    sys.modules["beluga"] = module_from_spec(installed)
    try:
        installed.loader.exec_module(sys.modules["beluga"])
    except BaseException:
        sys.modules["beluga"] = own
        raise


def _has_core(folders: Sequence[str]) -> bool:
    return PathFinder.find_spec("beluga._core", folders) is not None


def _installed(folder: Path) -> ModuleSpec | None:
    """Return the first package with a C core on Python's path, apart from this ``folder``."""
    for entry in sys.path:
        spec = PathFinder.find_spec("beluga", [entry])
        folders = None if spec is None else spec.submodule_search_locations
        if folders and Path(folders[0]).resolve() != folder and _has_core(folders):
            return spec
    return None
