# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The table of vLLM's fields that do not count, against the real configuration of vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_field_except_those_of_the_table_is_part_of_the_identity(
    vllm_python: str, tiny_model: Path
) -> None:
    """A field that is changed changes the identity, unless it is in the table. The table has no
    name that vLLM does not have. Engines that differ in limits, in compilation and in the model's
    folder are equivalent.
    """
    done = subprocess.run(
        [vllm_python, str(HERE / "config_fields.py"), str(tiny_model)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"unknown": [], "uncounted": [], "missed": [], "seen": [], "apart": []}
