# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Commands on blocks."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import captured

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.usefixtures("server")


@pytest.mark.parametrize("size", [1, 4096, 3_000_001])
def test_get_returns_the_bytes_of_put(run: Run, pool: list[str], tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(random.Random(size).randbytes(size))
    put = json.loads(run("put", "a key", source, *pool, "--json").stdout)
    assert (put["state"], put["bytes"]) == ("stored", size)
    assert run("get", "a key", target, *pool).returncode == 0
    assert target.read_bytes() == source.read_bytes()


def test_a_block_is_replaced_only_by_force(run: Run, pool: list[str]) -> None:
    def put(text: str, *options: str) -> str:
        ended = run("put", "key", "-", *pool, "--json", *options, stdin=text)
        return str(json.loads(ended.stdout)["state"])

    assert [put("first"), put("first"), put("first", "--force")] == ["stored", "present", "present"]
    refused = run("put", "key", "-", *pool, stdin="second")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        "'key' has other content (5 bytes); nothing was stored; use --force to replace it"
        in refused.stderr
    )
    assert run("get", "key", *pool).stdout == "first"
    assert put("second", "--force") == "replaced"
    assert run("get", "key", *pool).stdout == "second"


def test_a_digest_names_the_same_block_as_its_text(run: Run, pool: list[str]) -> None:
    key = json.loads(run("put", "key", "-", *pool, "--json", stdin="bytes").stdout)["key"]
    assert run("get", key, *pool).stdout == "bytes"


def test_a_missing_block_is_an_error(run: Run, pool: list[str]) -> None:
    missed = run("get", "nothing", *pool)
    assert (missed.returncode, missed.stdout) == (1, "")
    assert (
        missed.stderr == "beluga: error: there is no block 'nothing' in the namespace 'cli'; "
        "see 'beluga explain'\n"
    )


def test_nothing_is_written_to_a_full_disk(run: Run, pool: list[str], tmp_path: Path) -> None:
    """A limit of 1 MiB for the process's files stands in for a full disk."""
    source, target = tmp_path / "source", tmp_path / "disk" / "target"
    source.write_bytes(bytes(3 << 20))
    target.parent.mkdir()
    assert run("put", "key", source, *pool).returncode == 0
    code = (
        "import resource, signal; from beluga.cli.main import main; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); main()"
    )
    for before in (None, b"what was there"):
        if before is not None:
            target.write_bytes(before)
        ended = captured([sys.executable, "-c", code, "get", "key", target, *pool])
        assert ended.returncode == 1
        assert ended.stderr == f"beluga: error: {target}: File too large\n"
        left = [path.read_bytes() for path in target.parent.iterdir()]
        assert left == ([] if before is None else [before])


@pytest.mark.parametrize("arguments", [("get", "key"), ("stat",), ("stat", "--json"), ("ls",)])
def test_an_output_on_a_full_disk_is_a_one_line_error(
    arguments: tuple[str, ...], run: Run, pool: list[str], tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"forty-two")
    assert run("put", "key", tmp_path / "source", *pool).returncode == 0
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "beluga", *arguments, *pool],
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        "beluga: error: the output cannot be written: No space left on device; free space, or "
        "write it elsewhere\n",
    )


def test_get_prints_its_result_as_json(run: Run, pool: list[str], tmp_path: Path) -> None:
    run("put", "key", "-", *pool, stdin="bytes")
    result = json.loads(run("get", "key", tmp_path / "got", *pool, "--json").stdout)
    assert (result["bytes"], result["file"]) == (5, str(tmp_path / "got"))
    assert run("get", "key", *pool, "--json").returncode == 2


def test_a_key_that_is_not_text_names_a_block(run: Run, pool: list[str]) -> None:
    key = os.fsdecode(b"\xff\xfe")
    assert run("put", key, "-", *pool, stdin="bytes").returncode == 0
    assert run("get", key, *pool).stdout == "bytes"


def test_blocks_of_one_namespace_are_misses_in_another(run: Run, pool: list[str]) -> None:
    run("put", "key", "-", *pool, "--namespace", "one", stdin="bytes")
    assert run("get", "key", *pool, "--namespace", "two").returncode == 1
    assert run("get", "key", *pool, "--namespace", "one").stdout == "bytes"


def test_a_file_larger_than_any_block_is_refused(run: Run, pool: list[str], tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    refused = run("put", "key", path, *pool)
    assert refused.returncode == 1
    assert re.search(r"has more than \d+ bytes, the limit for a block of this pool", refused.stderr)


@pytest.mark.parametrize("source", ["/dev/zero", "-"])
def test_an_endless_input_is_read_up_to_the_limit(pool: list[str], source: str) -> None:
    """The process has 1 GiB of memory beyond what it starts with."""
    code = (
        "import re, resource; from pathlib import Path; from beluga.cli.main import main; "
        "used = int(re.search(r'VmSize:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]); "
        "most = used * 1024 + (1 << 30); resource.setrlimit(resource.RLIMIT_AS, (most, most)); "
        "main()"
    )
    with Path("/dev/zero").open("rb") as endless:
        ended = captured([sys.executable, "-c", code, "put", "key", source, *pool], stdin=endless)
    assert ended.returncode == 1
    refusal = rf"{source} has more than \d+ bytes, the limit for a block of this pool"
    assert re.fullmatch(rf"beluga: error: {refusal}\n", ended.stderr)


def test_keys_are_explained_listed_and_removed(run: Run, pool: list[str]) -> None:
    run("put", "one", "-", *pool, stdin="bytes")
    run("put", "two", "-", *pool, "--namespace", "other", stdin="more bytes")
    result = run("explain", "one", "two", "three", *pool)
    assert result.returncode == 1
    first, second, third = result.stdout.splitlines()
    assert first.startswith("one: hit, stored: 5 bytes")
    assert second.startswith("two: miss, namespace: it is stored in another namespace")
    assert "name is 'other' there and 'cli' here" in second
    assert third.startswith("three: miss, never: ")
    assert run("explain", "one", *pool).returncode == 0
    content = json.loads(run("explain", "two", *pool, "--field", "name=other", "--json").stdout)
    assert [(each["name"], each["cause"]) for each in content] == [("two", "stored")]
    blocks = json.loads(run("ls", *pool, "--json").stdout)
    assert sorted((block["namespace"], block["bytes"]) for block in blocks) == [
        ("cli", 5),
        ("other", 10),
    ]
    assert len(json.loads(run("ls", *pool, "--json", "--limit", 1).stdout)) == 1
    spaces = json.loads(run("ls", *pool, "--namespaces", "--json").stdout)
    assert sorted(space["fields"] for space in spaces) == ["name=cli", "name=other"]
    other = next(space["namespace"] for space in spaces if space["fields"] == "name=other")
    assert run("rm", "two", *pool, "--namespace", other).stderr == "removed: 1 of 1\n"
    refused = run("rm", "two", *pool, "--namespace", other)
    assert refused.returncode == 1
    assert refused.stderr.startswith("beluga: error: there is no block 'two' in that namespace")
    assert "name=other" not in run("ls", *pool, "--namespaces").stdout


def test_every_missing_key_is_listed(run: Run, pool: list[str]) -> None:
    assert "no block 'a', 'b', 'c' in that namespace" in run("rm", "a", "b", "c", *pool).stderr
    stderr = run("rm", *map(str, range(7)), *pool).stderr
    assert "no block '0', '1', '2', '3', '4' and 2 more in that namespace" in stderr


def test_explain_reports_an_unknown_fingerprint(run: Run, pool: list[str]) -> None:
    result = run("explain", "key", *pool, "--namespace", "0123456789abcdef")
    assert result.returncode == 1
    assert (
        "no namespace with the fingerprint 0123456789abcdef, so it is taken as a name"
        in result.stderr
    )


def test_control_characters_of_a_namespace_are_escaped(run: Run, pool: list[str]) -> None:
    run("put", "key", "-", *pool, "--namespace", "\x1b[2Jred", stdin="some bytes")
    for words in (["ls"], ["ls", "--namespaces"]):
        shown = run(*words, *pool).stdout
        assert "?[2Jred" in shown
        assert "\x1b" not in shown
