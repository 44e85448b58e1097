# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Walks the real configuration of vLLM and compares it with the table of fields that do not count.

Run it in .venv-vllm: config_fields.py MODEL. It prints the results as one line of JSON: table
entries that do not exist, entries of ``counted_fields.json`` that do not count or do not exist
(``config_fields.py counted`` prints this file), relevant fields that the identity ignores, ignored
fields that it includes, and the parts in which two equivalent engines differ.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm.config
import vllm.envs
from transformers import PretrainedConfig
from vllm.engine.arg_utils import EngineArgs

from beluga.connectors.identity import config_fields
from beluga.connectors.vllm import environment
from beluga.connectors.vllm.fields import LEFT_OUT

COUNTED = Path(__file__).parent / "counted_fields.json"


def classes() -> dict[str, type]:
    """Return all classes of vLLM's configuration, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(vllm.config.__path__):
        loaded = importlib.import_module(f"vllm.config.{module.name}")
        for name, one in vars(loaded).items():
            if isinstance(one, type) and dataclasses.is_dataclass(one):
                found[name] = one
    return found


def unknown() -> list[str]:
    """Return the entries of the tables that vLLM does not have."""
    known = classes()
    wrong = [name for name in environment.LEFT_OUT if name not in vllm.envs.environment_variables]
    for name, fields in LEFT_OUT.items():
        if name == "PretrainedConfig":
            continue
        if name not in known:
            wrong.append(name)
            continue
        have = {field.name for field in dataclasses.fields(known[name])}
        wrong += [f"{name}.{field}" for field in fields if field not in have]
    return wrong


def counted() -> dict[str, list[str]]:
    """Return the fields and the variables that count, by class."""
    names = {name: {field.name for field in dataclasses.fields(one)} for name, one in known()}
    found = {name: sorted(all_ - LEFT_OUT.get(name, {}).keys()) for name, all_ in names.items()}
    left = set(vllm.envs.environment_variables) - environment.LEFT_OUT.keys()
    return {**found, "environment": sorted(left)}


def known() -> list[tuple[str, type]]:
    """Return the classes whose objects are parts of a configuration, in order."""
    left = LEFT_OUT["VllmConfig"]
    outside = {"".join(map(str.capitalize, name.split("_"))) for name in left}
    return sorted((name, one) for name, one in classes().items() if name not in outside)


def parts(config: Any) -> Iterator[Any]:
    """Yield an object and all objects with fields that count in it, each once."""
    seen: set[int] = set()
    waiting = [config]
    while waiting:
        one = waiting.pop()
        if not dataclasses.is_dataclass(one) or isinstance(one, type) or id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, PretrainedConfig):
            yield one
            names = {field.name for field in dataclasses.fields(one)}
            names -= LEFT_OUT.get(type(one).__name__, {}).keys()
            waiting += [getattr(one, name, None) for name in sorted(names)]


def mutated(config: Any) -> tuple[list[str], list[str]]:
    """Change every field of every object, one at a time. Returns the changes that the identity
    misses, and those that it includes although the table has the field.
    """
    usual = config_fields(config, LEFT_OUT)
    missed, seen = [], []
    for owner in parts(config):
        kind = type(owner).__name__
        for field in dataclasses.fields(owner):
            before = getattr(owner, field.name, None)
            object.__setattr__(owner, field.name, f"changed {before!r:.20}")
            differs = config_fields(config, LEFT_OUT) != usual
            object.__setattr__(owner, field.name, before)
            if field.name in LEFT_OUT.get(kind, {}):
                seen += [f"{kind}.{field.name}"] * differs
            elif not differs:
                missed.append(f"{kind}.{field.name}")
    assert config_fields(config, LEFT_OUT) == usual
    return missed, seen


def main() -> None:
    """Print what was found."""
    if sys.argv[1:] == ["counted"]:
        print(json.dumps(counted(), indent=1))
        return
    arguments = EngineArgs(
        model=sys.argv[1],
        max_model_len=2048,
        enable_lora=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    )
    config = arguments.create_engine_config()
    missed, seen = mutated(config)
    values = config_fields(config, LEFT_OUT)
    elsewhere = tempfile.mkdtemp()
    shutil.copytree(sys.argv[1], elsewhere, dirs_exist_ok=True)
    again = config_fields(
        EngineArgs(
            model=elsewhere,
            max_model_len=1024,
            enable_lora=True,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
            max_num_seqs=7,
            gpu_memory_utilization=0.5,
            seed=3,
            enforce_eager=True,
            served_model_name="other",
        ).create_engine_config(),
        LEFT_OUT,
    )
    shutil.rmtree(elsewhere)
    print(
        json.dumps(
            {
                "unknown": unknown(),
                "uncounted": [
                    f"{kind}.{name}"
                    for kind, names in json.loads(COUNTED.read_text()).items()
                    for name in names
                    if name not in counted().get(kind, [])
                ],
                "missed": missed,
                "seen": seen,
                "apart": [name for name in values if values[name] != again.get(name)],
            }
        )
    )


if __name__ == "__main__":
    main()
