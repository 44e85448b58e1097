# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga.toml``: what it sets, what overrides it, and the errors of an invalid one."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from beluga import errors
from beluga.cli import settings
from beluga.cli.app import app, cxl_rpc
from beluga.pool import default_specs

Write = Callable[[str], Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the file that BELUGA_CONFIG names."""
    path = tmp_path / "beluga.toml"
    monkeypatch.setenv("BELUGA_CONFIG", str(path))
    for name in ("BELUGA_POOL", "BELUGA_LOG_LEVEL", "BELUGA_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)

    def write(text: str) -> Path:
        path.write_bytes(os.fsencode(text))
        return path

    return write


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def given(*words: str, program: Any = app) -> dict[str, Any]:
    """Return the parameters that a command gets, without running it."""
    command: Any = program
    context = command.make_context("beluga", list(words))
    context.invoke(command.callback, **context.params)
    remaining = list(words)
    while remaining[0] not in command.targets:
        del remaining[0]  # the program's own options
    while hasattr(command, "targets"):
        command = command.at(remaining[:1])
        name = remaining.pop(0)
        context = command.make_context(
            name, list(remaining), parent=context, resilient_parsing=hasattr(command, "targets")
        )
    return dict(context.params)


def test_a_table_sets_a_commands_options(write: Write) -> None:
    write(
        """
        [serve]
        quota-calls = 10
        quota_grants = 20
        admin = "0"
        disk = ["/a", "/b"]
        remote = "file:///c"
        disk-bytes = "64M"
        silent = 3
        watch = true
        [pool-create]
        interleave = false
        size = 4096
        [simulate]
        pool-bytes = "1.5GB"
        wide = true
        """
    )
    served = given("serve")
    assert (served["quota_calls"], served["quota_grants"], served["admin"]) == (10, 20, "0")
    assert (list(served["disk"]), list(served["remote"])) == (["/a", "/b"], ["file:///c"])
    assert (served["disk_bytes"], served["silent"], served["watch"]) == (64 << 20, 3.0, True)
    options = given("pool", "create", "x")
    assert (options["interleave"], options["device_size"]) == (False, 4096)
    simulated = given("simulate", "x")
    assert (simulated["pool"], simulated["wide"]) == (1_500_000_000, True)
    assert given("gateway")["port"] == 8080


def test_a_flag_overrides_the_file(write: Write) -> None:
    write('[serve]\nquota-calls = 10\ndisk = ["/a"]\n[pool-create]\ninterleave = false\n')
    served = given("serve", "--quota-calls", "11", "--disk", "/b")
    assert (served["quota_calls"], list(served["disk"])) == (11, ["/b"])
    assert given("pool", "create", "x", "--interleave")["interleave"] is True


def test_keys_of_all_commands(write: Write) -> None:
    write("host = 3\n[ping]\nhost = 4\n")
    assert (given("serve")["host"], given("ping")["host"]) == (3, 4)
    assert given("gateway")["host"] == "127.0.0.1"  # an address, not a host's number
    assert given("ping", "--host", "5")["host"] == 5
    assert given("ping", program=cxl_rpc)["host"] == 3


def test_tables_of_cxl_rpc_have_its_name(write: Write) -> None:
    write("[cxl-rpc-call]\ntimeout = 9\n[serve]\nquota-calls = 1\n")
    assert given("call", "0", program=cxl_rpc)["timeout"] == 9
    assert given("serve")["quota_calls"] == 1


def test_the_files_pool_has_priority_between_environment_and_mount(
    write: Write, shm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths = [str(shm / name) for name in ("file", "environment", "flag", "mounted")]
    write("")
    for path in paths:
        assert beluga("mount", "--create", "--size", "24M", path).exit_code == 0
    write(f'pool = "{paths[0]}"')
    assert shown_device("pool", "info", "--json") == paths[0]
    assert shown_device("pool", "info", "--json", "--pool", paths[2]) == paths[2]
    monkeypatch.setenv("BELUGA_POOL", paths[1])
    assert shown_device("pool", "info", "--json") == paths[1]
    monkeypatch.delenv("BELUGA_POOL")
    write("")
    assert shown_device("pool", "info", "--json") == paths[3]


def shown_device(*arguments: str) -> str:
    shown = beluga(*arguments)
    assert shown.exit_code == 0, shown.exception
    return str(json.loads(shown.stdout)["devices"][0]["path"])


def test_a_benchmark_never_overwrites_the_pool_of_the_file(write: Write) -> None:
    write('pool = "/dev/dax0.0"')
    assert not given("bench", "rpc")["pool"]
    assert [str(spec) for spec in default_specs()] == ["/dev/dax0.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hots = 3", "hots is not a setting of all commands; did you mean host?"),
        ("[srve]\nhost = 3", "[srve] is not a command; did you mean serve?"),
        (
            "\n[serve]\nquota-cals = 3",
            "[serve] quota-cals is not an option of this command; did you mean quota_calls?",
        ),
        ('[serve]\nhost = "a"', '[serve] host is "a"; give a whole number'),
        ("[serve]\nhost = true", "[serve] host is true; give a whole number"),
        ("[serve]\nwatch = 1", "[serve] watch is 1; give true or false"),
        ("[serve]\nadmin = 9464", "[serve] admin is 9464; give text in quotes"),
        ("[serve]\ndisk = [1]", "[serve] disk is 1; give text in quotes"),
        ("[serve]\nevents = []", "[serve] events is a list; give text in quotes"),
        ("[serve]\ndisk-bytes = 1.5", "[serve] disk-bytes is 1.5; give a size"),
        ("[serve]\ndisk-bytes = 'x'", "[serve] disk-bytes: 'x' is not a size"),
        ("host = 64", "host is 64; give 0 to 63"),
        ("[gateway]\nport = 65536", "[gateway] port is 65536; give 0 to 65535"),
        ("[serve]\na = 1\na = 2", "Cannot overwrite a value"),
        (
            "[serve]\nquota-calls = 1\nquota_calls = 1",
            "[serve] quota_calls is given twice, with - and with _",
        ),
        ("serve = 1", "serve is a table; write [serve] above its settings"),
        ("[pool]\na = 1", "[pool] is a group of commands; write [pool-create]"),
        ("[pool-destroy]\nyes = true", "yes: applies to one run only; give it on the command line"),
        ("[serve]\ndeclare-gone = true", "declare-gone: applies to one run only"),
        ('log_level = "loud"', "log_level is 'loud'; give debug, info, warning or error"),
        ("a = [", "is not TOML (Invalid value (at end of document)); correct it"),
        ("a = " + "[" * 5000, ""),
        ("host = 1\n# \udcff", ", line 2: the text is not UTF-8; convert it"),
        ("#" * (1 << 21), "more than 1048576 bytes"),
    ],
)
def test_a_mistake_is_reported_with_its_location(write: Write, text: str, message: str) -> None:
    path = write(text)
    refused = beluga("ping")
    assert isinstance(refused.exception, errors.SettingsError)
    assert str(refused.exception).startswith(str(path))
    assert message in str(refused.exception)
    assert "\n" not in str(refused.exception)


def test_help_works_with_an_invalid_file(write: Write, run: Run) -> None:
    write("nonsense = 1")
    assert "Usage" in run("ping", "--help").stdout
    refused = run("ping")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_the_file_is_searched_for_in_each_config_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    of_user = tmp_path / "beluga/beluga.toml"
    of_user.parent.mkdir()
    of_user.write_text("")
    result = write("")
    assert settings.find(Path("x")) == Path("x")
    assert settings.find(None) == result
    monkeypatch.delenv("BELUGA_CONFIG")
    assert settings.find(None) == of_user
    of_user.unlink()
    assert settings.find(None) in (None, Path("/etc/beluga/beluga.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/1/cwd/nobody may look here")
    assert settings.find(None) in (None, Path("/etc/beluga/beluga.toml"))


def test_the_current_folder_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELUGA_CONFIG", os.devnull)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beluga.toml").write_text("nonsense = 1")
    assert given("ping")["host"] is None


def test_config_shows_the_settings(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('pool = ["/a", "/b"]\n[serve]\nwatch = true\npool = "/c"\n')
    monkeypatch.setenv("BELUGA_POOL", "/d")
    result = json.loads(beluga("config", "--json").stdout)
    assert result["file"] == str(path)
    assert result["settings"] == [
        {"table": "", "key": "pool", "value": ["/a", "/b"], "unused": "BELUGA_POOL"},
        {"table": "serve", "key": "watch", "value": True, "unused": ""},
        {"table": "serve", "key": "pool", "value": ["/c"], "unused": "BELUGA_POOL"},
    ]
    assert not given("serve")["pool"]  # the environment's counts
    shown = beluga("config").stdout
    assert "[serve]" in shown
    assert "/a /b" in shown
    monkeypatch.delenv("BELUGA_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    if not Path("/etc/beluga/beluga.toml").exists():
        assert "no settings file" in beluga("config").stderr


def test_every_option_may_be_in_a_file_unless_it_concerns_one_run() -> None:
    """Every command has a table, and the keys of its options differ."""
    root: Any = app
    tables = settings.tables(root)
    assert {"serve", "pool-create", "gateway", "prefill-worker"} <= set(tables)
    for name, words in tables.items():
        command = root.at(words)
        own = [param for param in command.params if param.param_type_name == "option"]
        keys = {settings.key_of(param) for param in own}
        assert len(keys) == len(own), name
        assert keys - set(settings.options(command.params)) <= settings.ONCE
    assert not set(tables) & {"pool", "host", "log_level", "log_format"}


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "[gateway]\npolicy = 'linear:shared_credit=2'\n",
            ["gateway", "--worker", "http://127.0.0.1:1"],
            "decode_router=false (true or false); --policy is set in ",
        ),
        (
            "[serve]\nevents-form = 'none'\n",
            ["serve", "--events", "tcp://127.0.0.1:1", "--events-replay", "tcp://127.0.0.1:2"],
            "--events-form is none; give vllm, dynamo, llm-d, mooncake, vllm-v1, dynamo-v1, "
            "llm-d-v1, mooncake-v1; --events-form is set in ",
        ),
        (
            "[serve]\nevents-replay = 'tcp://127.0.0.1:2'\n",
            ["serve"],
            "--events and --events-replay need each other; give both; --events-replay is set in ",
        ),
    ],
)
def test_a_command_that_refuses_a_value_of_the_file_names_the_file(
    write: Write, text: str, words: list[str], message: str
) -> None:
    path = write(text)
    refused = beluga(*words)
    assert refused.exit_code == 2
    shown = "".join(refused.stderr.replace("│", " ").split())  # the box wraps lines at any position
    assert "".join(f"{message}{path}".split()) in shown


def test_a_rejected_flag_is_not_reported_as_an_error_of_the_file(write: Write) -> None:
    write("[serve]\nevents-form = 'none'\n")
    refused = beluga("serve", "--events-form", "json", "--events", "a", "--events-replay", "b")
    assert "is json; give vllm, dynamo, llm-d, mooncake, vllm-v1" in " ".join(
        refused.stderr.split()
    )
    assert "is set in" not in refused.stderr
