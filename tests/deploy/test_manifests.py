# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The Helm chart and the manifests that are rendered from it: they are valid, fresh, and start
existing commands.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_lines import check_command, check_plugin
from support.blocks import eventually
from support.commands import captured

import beluga
from beluga.pool import Pool

yaml = pytest.importorskip("yaml", reason="no PyYAML here (extra check)")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="extra check lacks")
jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema here (extra check)")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/dev"))
from gen_manifests import CHART, EXAMPLE, MANIFESTS, NoHelmError, render  # noqa: E402

FILES = sorted(MANIFESTS.glob("*.yaml"))
OTHERS = ("Kustomization", "PodMonitor")  # kinds that are not part of Kubernetes
EXAMPLE_VALUES = yaml.safe_load(EXAMPLE.read_text())
VARIANTS = {
    "example": {},
    "emulated": {"pool": {"memory": "emulated", "devices": ["/dev/shm/beluga/0"], "create": True}},
    "plugin": {"pool": {"deviceResource": "example.com/dax"}},
    "disk": {
        "server": {"disk": {"directory": "/mnt/nvme/beluga"}, "options": ["--eviction=s3fifo"]}
    },
    "report": {"node": {"doctor": "report"}},
    "no engines": {
        "engines": {"enabled": False},
        "gateway": {"workers": ["http://a:8000"], "options": ["--policy", "linear"]},
        "monitor": {"enabled": True},
    },
}
WRONG_VALUES = (
    {"hosts": {"node-a": 64}},
    {"hosts": {"node-a": "one"}},
    {"pool": {"memory": "dram"}},
    {"pool": {"devices": []}},
    {"server": {"replica": 2}},
)


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def all_manifests() -> list[dict[str, Any]]:
    return [document for path in FILES for document in documents(path.read_text())]


def validate(manifest: Mapping[str, Any]) -> None:
    """Check a manifest strictly: unknown fields are errors."""
    if manifest["kind"] not in OTHERS:
        newest = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, newest, strict=True)


def containers(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        yield from pod.get("initContainers", [])
        yield from pod.get("containers", [])


def run_script(script: str, tmp_path: Path, *, number: str | None) -> list[list[str]]:
    """Run a container's script with stand-ins that record their arguments. Returns the
    arguments.
    """
    hosts, noted = tmp_path / "hosts", tmp_path / "noted"
    for folder in (hosts, tmp_path / "bin"):
        folder.mkdir(exist_ok=True)
    noted.write_text("")
    if number is not None:
        (hosts / "node-a").write_text(number)
    for name in ("beluga", "vllm"):
        program = f"#!/bin/sh\n{{ printf '%s\\0' {name} \"$@\"; printf '\\n'; }} >>{noted}\n"
        # `pool info` fails: there is no pool yet
        program += '[ "$1 $2" != "pool info" ]\n'
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NODE_NAME": "node-a",
        "NAMESPACE": "beluga",
    }
    ended = captured(
        ["/bin/sh", "-euc", script.replace("/etc/beluga/hosts", str(hosts))],
        env=environment,
        timeout=60,
    )
    assert (ended.returncode == 0) == (number is not None or "hosts" not in script), ended.stderr
    if ended.returncode:
        assert "node-a" in ended.stderr
    return [line.split("\0")[:-1] for line in noted.read_text().splitlines()]


def started(manifests: list[dict[str, Any]], tmp_path: Path) -> list[list[str]]:
    """Return the command lines that the containers and their probes run."""
    command_lines = []
    for container in containers(manifests):
        command, args = container["command"], container.get("args", [])
        if command[0] == "/bin/sh":
            script = args[0] if args else command[2]
            command_lines += run_script(script, tmp_path, number="1")
        else:
            command_lines.append([*command, *args])
        probe = container.get("readinessProbe", {}).get("exec")
        if probe:
            command_lines += run_script(probe["command"][2], tmp_path, number="1")
    return command_lines


def check_all(manifests: list[dict[str, Any]], tmp_path: Path) -> set[str]:
    """Check every manifest and every command; return the beluga commands that are started."""
    names = set()
    for manifest in manifests:
        validate(manifest)
    for words in started(manifests, tmp_path):
        if words[0] == "beluga":
            check_command("beluga", words[1:])
            names.add(words[1])
        elif words[0] == "vllm":
            check_plugin(words)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for manifest in documents(path.read_text()):
        validate(manifest)


def test_commands_in_manifests_parse(tmp_path: Path) -> None:
    commands = check_all(all_manifests(), tmp_path)
    assert commands == {"serve", "ping", "doctor", "gateway"}


def test_a_node_without_a_number_is_reported(tmp_path: Path) -> None:
    scripts = [c["args"][0] for c in containers(all_manifests()) if "hosts" in str(c.get("args"))]
    assert len(scripts) >= 3
    for script in scripts:
        assert run_script(script, tmp_path, number=None) == []


def test_a_strict_check_finds_mistakes() -> None:
    (server,) = (m for m in all_manifests() if m["kind"] == "Deployment" and "server" in str(m))
    server["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(server)


def test_every_file_is_listed_once() -> None:
    (listed,) = documents((MANIFESTS / "kustomization.yaml").read_text())
    assert sorted(listed["resources"]) == sorted(
        path.name for path in FILES if path.name != "kustomization.yaml"
    )


def test_versions_and_images_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (beluga.__version__,) * 2
    images = {container["image"] for container in containers(all_manifests())}
    assert images == {f"beluga:{beluga.__version__}", f"beluga-vllm:{beluga.__version__}"}
    for page in (ROOT / "docs/deploy/container").glob("*"):
        named = re.findall(r"\b(beluga(?:-vllm)?:[\d.]+)\b", page.read_text())
        assert set(named) <= images, page


def test_pods_that_use_the_pool_share_processes_and_the_runtime_directory() -> None:
    for manifest in all_manifests():
        pod = manifest.get("spec", {}).get("template", {}).get("spec")
        if pod is None or manifest["metadata"]["name"] == "beluga-gateway":
            continue
        assert pod["hostPID"] is True
        paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
        assert "/run/beluga" in paths
        mounted = {m["name"]: m["mountPath"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert mounted["run"] == "/run/beluga"


def test_the_server_script_serves_and_passes_its_probes(shm: Path, tmp_path: Path) -> None:
    (server,) = [c for c in containers(all_manifests()) if c["name"] == "server"]
    (tmp_path / "node-a").write_text("0")
    (tmp_path / "run").mkdir()
    Pool.create([str(shm / "device")], device_size=24 << 20).close()
    (tmp_path / "beluga").write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from beluga.cli.main import main; main()' \"$@\"\n"
    )
    (tmp_path / "beluga").chmod(0o755)

    def command(script: str) -> list[str]:
        script = script.replace("/etc/beluga/hosts", str(tmp_path))
        port = str(server["ports"][0]["containerPort"])
        return ["/bin/sh", "-euc", script.replace(f"0.0.0.0:{port}", "0")]

    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NODE_NAME": "node-a",
        "BELUGA_POOL": str(shm / "device"),
        "BELUGA_RUNTIME_DIR": str(tmp_path / "run"),
        "PYTHONPATH": str(ROOT),
    }
    probe = command(server["readinessProbe"]["exec"]["command"][2])
    assert subprocess.run(probe, env=environment, check=False, timeout=60).returncode != 0
    with subprocess.Popen(command(server["args"][0]), env=environment, cwd=shm) as process:
        try:
            assert eventually(lambda: not subprocess.call(probe, env=environment, cwd=shm), 60)
        finally:
            process.terminate()  # as Kubernetes does: the shell has become the server
        assert process.wait(timeout=60) == 0


def test_the_schema_accepts_the_values_and_rejects_mistakes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values | EXAMPLE_VALUES, schema)
    for wrong in WRONG_VALUES:
        (part, setting), *_ = wrong.items()
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | {part: {**values[part], **setting}}, schema)


def rendered(values: Mapping[str, Any]) -> dict[str, str]:
    try:
        return render(values)
    except NoHelmError as error:
        pytest.skip(str(error))


def test_generated_manifests_are_current(tmp_path: Path) -> None:
    rendered(EXAMPLE_VALUES)
    script = [sys.executable, str(ROOT / "scripts/dev/gen_manifests.py"), str(tmp_path)]
    subprocess.run(script, check=True, timeout=120)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.yaml")}
    assert made == {path.name: path.read_text() for path in FILES}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_chart_are_valid(name: str, tmp_path: Path) -> None:
    made = rendered({**EXAMPLE_VALUES, **VARIANTS[name]})
    texts = [text for file, text in made.items() if file.endswith(".yaml")]
    commands = check_all([d for text in texts for d in documents(text)], tmp_path)
    assert ("pool" in commands) == (name == "emulated")


def test_helm_refuses_two_nodes_with_one_number() -> None:
    rendered(EXAMPLE_VALUES)
    with pytest.raises(RuntimeError, match="two nodes"):
        render({"hosts": {"node-a": 1, "node-b": 1}})


@pytest.mark.parametrize("values", WRONG_VALUES, ids=str)
def test_helm_rejects_invalid_values(values: dict[str, Any]) -> None:
    rendered(EXAMPLE_VALUES)
    with pytest.raises(RuntimeError, match=rf"/{next(iter(values))}"):
        render(values)
