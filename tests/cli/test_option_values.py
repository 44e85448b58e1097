# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Invalid values of an option are rejected with its name and exit status 2, before the command has
done anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from beluga.cli.app import app, cxl_rpc
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.tiers.disk import DiskTier

HUGE = 10**23
# Options of sizes that have no limit of their own: of quotas and buffers, and of what is computed.
UNLIMITED = {
    *("serve --quota-bytes", "gateway --max-bodies", "size --disk"),
    *("simulate --pool-bytes", "simulate --local", "simulate --hbm"),
}
# The other options of sizes, with a size that parses and that no machine has.
NEEDED = "--disk {folder}/new"
MADE = "pool create {folder}/a"
ABSURD = {
    "serve --disk-bytes": f"serve {NEEDED}",
    "replay --disk-bytes": f"replay {NEEDED}",
    "replay --pool-bytes": "replay",
    "replay --block-bytes": "replay",
    "size --memory": "size",
    "pool create --size": MADE,
    "pool create --block-bytes": f"{MADE} --size 8M",
    "pool create --bulk-size": f"{MADE} --size 8M",
    "mount --size": "mount --create {folder}/a",
    "mount --block-bytes": "mount --create {folder}/a --size 8M",
}


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_of(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_the_options_of_sizes_are_known() -> None:
    sizes = {
        f"{' '.join(words)} {option.opts[0]}"
        for program in (app, cxl_rpc)
        for words in program.leaves()
        for option in program.at(words).params
        if _value(option, "2M") == 2 << 20 or _value(option, "2M") == [2 << 20]
    }
    assert sizes == ABSURD.keys() | UNLIMITED


def _value(option: Any, text: str) -> object:
    try:
        return option.type.convert(text, option, None)
    except (click.BadParameter, ValueError):
        return None


@pytest.mark.parametrize("value", ["1", "900T", "8388607T"])
@pytest.mark.parametrize("option", ABSURD)
def test_an_absurd_size_is_one_error_and_nothing_else(
    tmp_path: Path, option: str, value: str
) -> None:
    (tmp_path / "pool").mkdir()
    Pool.create(tmp_path / "pool/a", device_size=24 << 20, sparse=True).close()
    DiskTier(tmp_path / "new", 8 << 20).close()  # a tier that exists has its own checks
    words = ABSURD[option].format(folder=tmp_path).split()
    if words[0] == "serve":
        words += ["--pool", str(tmp_path / "pool/a")]
    refused = beluga(*words, option.rsplit(maxsplit=1)[-1], value)
    if refused.exit_code == 2:
        assert option.rsplit(maxsplit=1)[-1] in output_of(refused)
        return
    assert isinstance(refused.exception, BelugaError), refused.output
    assert refused.output == ""
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "99999T"), "--size; device_size"),
        (("--size", "8M", "--block-bytes", "1"), "--block-bytes (block_bytes) is from 64 to"),
        (("--size", "8M", "--block-bytes", "0"), "--block-bytes (block_bytes) is from 64 to"),
    ],
)
def test_an_impossible_pool_is_rejected_by_its_option(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = beluga("pool", "create", tmp_path / "a", *arguments)
    assert message in str(refused.exception)
    assert not (tmp_path / "a").exists()


def test_disks_and_stores_are_checked_before_a_takeover(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    Pool.create(tmp_path / "pool/a", device_size=24 << 20, sparse=True).close()
    (tmp_path / "plain").write_text("x")
    for arguments, message in [
        (("--disk", tmp_path / "no/disk", "--disk-bytes", "16M"), "there is no folder"),
        (("--disk", "/dev/null", "--disk-bytes", "16M"), "is not a folder, file or block device"),
        (("--disk", "", "--disk-bytes", "16M"), "the path of a disk tier is empty"),
        (("--disk", tmp_path / "plain", "--disk-bytes", "16M"), "but is not a disk tier; give"),
        (("--disk", tmp_path / "pool/a", "--disk-bytes", "16M"), "but is not a disk tier; give"),
        (
            ("--disk", tmp_path / "d", "--disk", f"{tmp_path}/./d", "--disk-bytes", "32M"),
            "twice; give each disk once",
        ),
        (("--remote", "file:a"), "write file:///PATH"),
        (("--remote", f"file://{tmp_path}/plain"), "plain is not a folder; give"),
        (("--remote", f"file://{tmp_path}/plain/a/b"), "plain is not a folder; give"),
    ]:
        refused = beluga("serve", "--pool", tmp_path / "pool/a", *arguments)
        assert refused.exit_code == 1
        assert message in str(refused.exception)
        assert "serving" not in refused.output


def test_explain_takes_either_fields_or_a_namespace(pool: list[str], server: object) -> None:
    refused = beluga("explain", "k", *pool, "--field", "a=b", "--namespace", "foo")
    assert refused.exit_code == 2
    assert "--field and --namespace foo exclude each other" in output_of(refused)


@pytest.mark.parametrize("session", ["foo", "pid:x", "lane:"])
def test_an_impossible_session_number_is_rejected(
    pool: list[str], server: object, session: str
) -> None:
    refused = beluga("trace", *pool, "--session", session)
    assert refused.exit_code == 2
    assert "give pid:N, host:N, lane:N or 16 hex digits" in output_of(refused)
