#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Render the Helm chart into ``docs/deploy/kubernetes``, for clusters without Helm.

Usage: ``gen_manifests.py [FOLDER]``. The renderer is ``helm`` if it is on PATH, else Helm's own
library in the package helm-python-sdk (extra ``helm``). The exit status is 77 if neither is
available.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docs/deploy/helm/beluga"
EXAMPLE = ROOT / "docs/deploy/helm/example-values.yaml"
MANIFESTS = ROOT / "docs/deploy/kubernetes"
NAMESPACE = "beluga"
HEAD = "# Generated from docs/deploy/helm by scripts/dev/gen_manifests.py; do not edit.\n"
# The pods use the node's processes, devices and directories.
NAMESPACE_YAML = f"""apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    pod-security.kubernetes.io/enforce: privileged
"""


class NoHelmError(Exception):
    """No renderer for charts is available."""


def render(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the rendered templates of the chart, by the template's name.

    Raises NoHelmError, and RuntimeError with Helm's message if it refuses the values.
    """
    if shutil.which("helm") is not None:
        return _by_program(values)
    try:
        import helm_python
    except ImportError:
        raise NoHelmError("no helm here, and no package helm-python-sdk") from None
    with helm_python.Chart.load(CHART) as chart:
        try:
            chart.validate_schema(dict(values))
            found = chart.render(dict(values), name="beluga", namespace=NAMESPACE)
        except helm_python.HelmError as error:
            raise RuntimeError(str(error)) from None
    return {Path(name).name: text for name, text in found.items()}


def _by_program(values: Mapping[str, Any]) -> dict[str, str]:
    command = ["helm", "template", "beluga", str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    rendered = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False
    )
    if rendered.returncode != 0:
        raise RuntimeError(rendered.stderr)
    found: dict[str, str] = {}
    for document in rendered.stdout.split("---\n# Source: ")[1:]:
        name, _, text = document.partition("\n")
        key = name.rpartition("/")[2]
        found[key] = f"{found[key]}---\n{text}" if key in found else text
    return found


def manifests() -> dict[str, str]:
    """Return the files of ``docs/deploy/kubernetes``."""
    import yaml

    rendered = render(yaml.safe_load(EXAMPLE.read_text()))
    files = {"namespace.yaml": NAMESPACE_YAML}
    for name, text in sorted(rendered.items()):
        if name.endswith(".yaml") and text.strip():
            lines = [line.rstrip() for line in text.strip().splitlines()]
            files[name] = HEAD + "\n".join(line for line in lines if line) + "\n"
    listed = "".join(f"  - {name}\n" for name in files)
    files["kustomization.yaml"] = (
        f"{HEAD}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"namespace: {NAMESPACE}\nresources:\n{listed}"
    )
    return files


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=MANIFESTS)
    folder = parser.parse_args().folder
    try:
        files = manifests()
    except (NoHelmError, ImportError) as error:
        print(f"gen_manifests: {error}; pip install -e '.[helm]'", file=sys.stderr)
        sys.exit(77)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
