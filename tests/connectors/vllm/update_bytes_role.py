# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Updates the weights of a real vLLM, with and without each step that follows an update.

Run it in .venv-vllm: update_bytes_role.py POOL FOLDER. For each step that is left out, and for
none, it prints the blocks of a prompt that differ from those that the new weights compute, as one
line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from identity_cases import BLOCK_TOKENS, Case
from identity_role import Engine, Watched, changed, make_model

SHORT, LONG = 2 * BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS + 1
NOTHING = "nothing"


def _steps() -> dict[str, Callable[[], Any]]:
    """Return how each step is left out."""
    from beluga.connectors.vllm import updates

    return {
        NOTHING: contextlib.nullcontext,
        "the calls of the workers": lambda: mock.patch.object(updates, "_changes", _never),
        "the notice": lambda: mock.patch.object(updates.EngineUpdates, "updated"),
        "a generation of its own": lambda: mock.patch.object(updates.WeightsGeneration, "reset"),
    }


def _never(*_: Any) -> bool:
    return False


def main() -> None:
    """Print what was found."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pool, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    from beluga_bench.vllm.engine import _override_kernels

    _override_kernels()
    model = folder / "usual"
    make_model(model)
    other = changed(model, "middle", folder)
    watched = Watched()
    watched.watch()
    engine = Engine(pool, str(model), Case())
    engine.identified(watched, None, "first")

    def update(weights: Any) -> None:
        engine.call("reload_weights", {"weights_path": str(weights)})

    def computed(salt: str, tokens: int) -> list[str]:
        engine.run(None, salt=salt, tokens=tokens)
        engine.settle()
        return list(watched.bytes)

    def wrong(step: str) -> list[int]:
        """Return the blocks that are wrong after an update without this step."""
        update(model)
        engine.forget()
        old = computed(step, SHORT)
        with _steps()[step]():
            update(other)
        computed(step, LONG)  # on what vLLM's own cache has
        engine.forget()
        answers = computed(step, LONG)
        assert answers[: len(old)] != old or step != NOTHING
        right = computed(f"{step}, alone", LONG)
        return [index for index, expected in enumerate(right) if answers[index] != expected]

    print(json.dumps({step: wrong(step) for step in _steps()}), file=answers, flush=True)
    engine.end()


if __name__ == "__main__":
    main()
