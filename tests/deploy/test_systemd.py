# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The systemd units of ``docs/deploy/systemd``: their commands, and their behavior under a real
systemd.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booted import SOURCES, UNITS, Booted, CannotBootError, why_not
from command_lines import check_command
from support.blocks import eventually
from support.commands import captured

SERVICES = sorted(UNITS.glob("*.service"))
PROGRAM = "/opt/beluga/bin/beluga"
MONITORING = (SOURCES / "docs/operate/monitoring.md").read_text()
[TARGETS] = re.findall(r"targets: (\[.*?\])", MONITORING)
DAY_TWO = (SOURCES / "docs/operate/day-two.md").read_text()
DISK = "/var/lib/beluga/disk"


def settings() -> dict[str, str]:
    """Return the variables of the example environment file."""
    text = (UNITS / "beluga.env").read_text()
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))


def commands_of(unit: Path) -> list[str]:
    """Return the beluga commands of a unit, with the values of the environment file."""
    lines = re.findall(rf"^Exec\w+=.*?{PROGRAM} (.*)$", unit.read_text(), re.MULTILINE)
    for name, value in settings().items():
        lines = [line.replace(f"${name}", value) for line in lines]
    return [re.sub(r"[ ;]*>.*$", "", line) for line in lines]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_the_commands_of_units_parse(unit: Path) -> None:
    commands = commands_of(unit)
    assert commands
    for line in commands:
        assert "$" not in line
        check_command("beluga", line.split())


def test_every_setting_of_the_environment_file_is_used() -> None:
    units = "".join(path.read_text() for path in SERVICES)
    unused = [name for name in settings() if name not in units and name != "BELUGA_POOL"]
    assert unused == []


def test_systemd_reports_no_error(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here (Debian's package systemd)")
    shutil.copytree(UNITS, tmp_path, dirs_exist_ok=True)
    for unit in tmp_path.glob("*.service"):  # systemd-analyze requires the program and the user
        unit.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
    output = captured([*command, *map(str, sorted(tmp_path.glob("*.service")))], timeout=60)
    assert (output.returncode, output.stderr) == (0, "")


@pytest.fixture
def booted(tmp_path: Path) -> Iterator[Booted]:
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    try:
        machine = Booted(tmp_path / "root")
    except CannotBootError as error:
        pytest.skip(str(error))
    yield machine
    machine.end()


def is_so(machine: Booted, unit: str, status: str) -> Callable[[], bool]:
    """Return a condition: the unit has started and has this status."""
    return lambda: (
        (machine.show(unit, "ActiveState"), machine.show(unit, "StatusText"))
        == (
            "active",
            status,
        )
    )


@pytest.mark.slow
def test_a_standby_takes_over_and_the_restarted_server_stands_by(booted: Booted) -> None:
    for unit in ("beluga-pool", "beluga-serve", "beluga-standby"):
        started = booted.run("systemctl", "start", unit)
        assert started.returncode == 0, booted.log()
    assert is_so(booted, "beluga-serve", "serving, epoch 1")()
    assert is_so(booted, "beluga-standby", "standing by")()
    assert booted.as_engine("put", "key", "/etc/passwd").returncode == 0, booted.log()
    lock_files = booted.run("ls", "/run/beluga").stdout
    assert lock_files

    booted.run("kill", "-9", booted.show("beluga-serve", "MainPID"))
    assert eventually(is_so(booted, "beluga-standby", "serving, epoch 2"), 60)
    assert eventually(is_so(booted, "beluga-serve", "standing by"), 60), booted.log()
    assert booted.as_engine("get", "key").stdout.startswith("root:")
    assert booted.show("beluga-serve", "NRestarts") == "1"

    booted.run("systemctl", "stop", "beluga-serve", "beluga-standby")
    assert booted.show("beluga-standby", "Result") == "success"
    assert booted.run("ls", "/run/beluga").stdout == lock_files
    assert booted.run("systemctl", "restart", "beluga-pool").returncode == 0  # the pool is there
    assert booted.run("systemctl", "start", "beluga-serve").returncode == 0
    assert booted.show("beluga-serve", "StatusText").startswith("serving, epoch ")
    assert booted.as_engine("get", "key").stdout.startswith("root:")


SCRAPE = """
import urllib.request
for target in {targets}:
    with urllib.request.urlopen("http://" + target + "/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = [line for line in text.splitlines() if line.startswith(("beluga_server_serving ",
             "beluga_takeovers_total", "beluga_server_info"))]
    print(*found, sep="\\n")
"""


def scraped(machine: Booted) -> list[str]:
    """Return the series of all servers, as the documented configuration scrapes them."""
    answer = machine.python(SCRAPE.format(targets=TARGETS))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


@pytest.mark.slow
def test_units_monitoring_and_doctor_are_consistent_for_two_users_after_a_failover(
    booted: Booted,
) -> None:
    for unit in ("beluga-pool", "beluga-serve", "beluga-standby"):
        assert booted.run("systemctl", "start", unit).returncode == 0, booted.log()
    assert sorted(line for line in scraped(booted) if "serving" in line) == [
        "beluga_server_serving 0",
        "beluga_server_serving 1",
    ]

    # A member of the group stores a block under a strict umask; another member can list and read
    # it.
    assert booted.as_engine("put", "key", "/etc/passwd", umask="077").returncode == 0
    colleague = booted.as_engine("ls", "--namespaces", "--json", user=1235, umask="077")
    assert "fields" in colleague.stdout, colleague.stderr
    assert json.loads(colleague.stdout)[0]["fields"], colleague.stdout
    assert booted.as_engine("get", "key", user=1235, umask="077").stdout.startswith("root:")
    assert booted.as_engine("trace", user=1235).returncode == 0

    # `doctor` finds the same pool, runtime directory and server for both users.
    for user in (1234, 1235):
        report = json.loads(booted.as_engine("doctor", "--json", user=user).stdout)
        findings = {finding["name"]: finding for finding in report}
        for check in ("pool-server", "runtime-dirs", "pool-superblocks"):
            assert findings[check]["level"] == "ok", findings[check]

    # `stop` names the user whose permission it needs; any member of the group may `drain`.
    refused = booted.as_engine("stop")
    assert refused.returncode == 1
    assert "systemctl stop beluga-serve.service" in refused.stderr, refused.stderr
    drained = booted.as_engine("drain", "--timeout", "30", user=1235)
    assert drained.returncode == 0, drained.stderr
    assert booted.as_engine("drain", "--undo").returncode == 0

    # The standby takes over and is scraped, so BelugaNobodyServes does not fire.
    booted.run("systemctl", "kill", "--signal=KILL", "beluga-serve")
    assert eventually(is_so(booted, "beluga-standby", "serving, epoch 2"), 60), booted.log()
    booted.run("systemctl", "stop", "beluga-serve")
    booted.run("systemctl", "start", "beluga-serve")
    lines = scraped(booted)
    assert "beluga_server_serving 1" in lines
    assert 'beluga_takeovers_total{reason="gone"} 1' in lines
    assert len({line for line in lines if line.startswith("beluga_server_info")}) == 1  # one pool

    # Root's own default pool and the group's pool exist side by side without conflicts.
    assert (
        booted.run("/opt/beluga/bin/beluga", "mount", "--create", "--size", "24M").returncode == 0
    )
    assert booted.as_engine("get", "key").stdout.startswith("root:")


@pytest.mark.slow
def test_the_gateway_unit_is_active_when_it_listens(booted: Booted) -> None:
    assert booted.run("systemctl", "start", "beluga-gateway").returncode == 0, booted.log()
    assert is_so(booted, "beluga-gateway", "routing on http://127.0.0.1:8080")()
    assert booted.run("systemctl", "stop", "beluga-gateway").returncode == 0
    assert booted.show("beluga-gateway", "Result") == "success"


@pytest.mark.slow
def test_a_server_that_hangs_is_ended_by_its_watchdog(booted: Booted) -> None:
    booted.run("sh", "-c", "sed -i s/^WatchdogSec=.*/WatchdogSec=2/ /etc/systemd/system/*.service")
    booted.run("systemctl", "daemon-reload")
    for unit in ("beluga-pool", "beluga-serve", "beluga-standby"):
        assert booted.run("systemctl", "start", unit).returncode == 0, booted.log()
    booted.run("kill", "-STOP", booted.show("beluga-serve", "MainPID"))
    assert eventually(is_so(booted, "beluga-standby", "serving, epoch 2"), 60), booted.log()
    assert eventually(is_so(booted, "beluga-serve", "standing by"), 60), booted.log()
    # nothing but SIGKILL ends a stopped process
    assert booted.show("beluga-serve", "NRestarts") == "1"


class Operator:
    """Root's shell: runs the commands of a heading of ``docs/operate/day-two.md``, without those
    of pip, because this machine has no network and one version.
    """

    def __init__(self, machine: Booted) -> None:
        self._machine = machine
        self._begin = self.block("")

    @staticmethod
    def block(heading: str, number: int = 0) -> list[str]:
        """Return the commands of a block below a heading; without a heading, of the first block."""
        part = DAY_TWO.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] or DAY_TWO
        text = re.findall(r"```shell\n(.*?)```", part, re.DOTALL)[number]
        lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
        return [line for line in lines if "/pip " not in line]

    def follow(self, heading: str, number: int = 0, **values: str) -> None:
        """Run the commands as written, with ``values`` in place of names such as PATH..."""
        for line in self.block(heading, number):
            command = line
            for name, value in values.items():
                command = re.sub(rf"(?<![\w$]){name}\b(\.\.\.)?", value, command)
            ran = self.run(command)
            assert ran.returncode == 0, (
                command,
                ran.stdout,
                ran.stderr,
                self._machine.log()[-2000:],
            )

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command after those with which the page begins. Its questions are answered: yes."""
        return self._machine.run(
            "sh", "-c", "\n".join([*self._begin, f"{{ {line}\n}} <<'E'\ny\nE"])
        )

    def leftovers(self) -> list[str]:
        """Return the paths with Beluga's name outside of the sources and the packages."""
        ended = self._machine.run(
            *("find", "/", "-path", "/proc", "-prune", "-o", "-path", "/sys", "-prune", "-o"),
            *("-path", "/usr", "-prune", "-o", "-path", "/opt/*", "-prune", "-o"),
            *("-iname", "*beluga*", "-print"),
        )
        return ended.stdout.split()


@pytest.mark.slow
def test_day_two_is_as_documented(booted: Booted) -> None:
    """An upgrade, a change of the format, a reboot and the removal, line by line."""
    operator = Operator(booted)
    units = ("beluga-pool", "beluga-serve", "beluga-standby")
    options = f"s,^BELUGA_SERVE_OPTIONS=.*,& --disk {DISK} --disk-bytes 64M,"
    booted.run("sed", "-i", options, "/etc/beluga/beluga.env")
    booted.run("sed", "-i", options.replace("SERVE", "STANDBY"), "/etc/beluga/beluga.env")
    for unit in units:
        assert booted.run("systemctl", "start", unit).returncode == 0, booted.log()
    assert booted.as_engine("put", "key", "/etc/passwd").returncode == 0

    def has_the_block() -> bool:
        return booted.as_engine("get", "key").stdout.startswith("root:")

    operator.follow("Upgrade")
    assert has_the_block()
    devices = "/dev/shm/beluga/0 /dev/shm/beluga/1 --size 24M"
    operator.follow("Upgrade", 1, PATH=devices, DISK=DISK)
    assert eventually(has_the_block, 60), booted.log()

    # A planned reboot with emulated memory: the disk has every block.
    operator.follow("Stop and drain under systemd")
    booted.run("sh", "-c", "rm -r /dev/shm/beluga; systemctl stop beluga-pool")
    for unit in units:
        assert booted.run("systemctl", "start", unit).returncode == 0, booted.log()
    assert eventually(has_the_block, 60), booted.log()

    operator.follow("Remove", PATH="/dev/shm/beluga/0 /dev/shm/beluga/1")
    assert operator.leftovers() == []
    assert "beluga" not in booted.run("cat", "/etc/passwd", "/etc/group").stdout
