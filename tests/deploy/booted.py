# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A real systemd with our units, as process 1 of namespaces of its own.

Its root is a tmpfs of its own, with this machine's /usr read-only in it: what systemd does when it
boots (it cleans /tmp, for one) cannot reach this machine. Only the units of ``docs/deploy/systemd``
exist there, installed by ``docs/operate/deploy.md``. The program is
``/opt/beluga/bin/beluga``: this Python, and these sources, read-only.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from support.commands import captured

SOURCES = Path(__file__).resolve().parents[2]
UNITS = SOURCES / "docs/deploy/systemd"
SYSTEMD = Path("/lib/systemd/systemd")
PAGE = SOURCES / "docs/operate/deploy.md"
INSTALL = PAGE.read_text().partition("tested: install -->\n```shell\n")[2].partition("```")[0]
BOOT_S = 30.0

_BOOT = r"""
set -eu
root=$1 python=$2 packages=$3 sources=$4 install=$5
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
cd "$root"
mkdir -p usr proc sys dev run tmp var/lib var/cache etc/systemd/system etc/beluga opt/python \
    opt/packages opt/sources opt/names opt/beluga/bin old
mount -t tmpfs -o mode=755 tmpfs dev    # a mount, so that systemd does not mount the machine's
mkdir dev/shm
chmod 1777 tmp dev/shm
readonly_bind() { mount --rbind "$1" "$2" && mount -o remount,bind,ro "$2"; }
readonly_bind /usr usr
readonly_bind "$python" opt/python
readonly_bind "$packages" opt/packages
readonly_bind "$sources" opt/sources
for name in bin sbin lib lib64; do
    if [ -L "/$name" ]; then
        cp -P "/$name" "$name"
    elif [ -d "/$name" ]; then
        mkdir "$name" && readonly_bind "/$name" "$name"
    fi
done
cp /etc/ld.so.cache /etc/localtime etc/ 2>/dev/null || :
for name in null zero full random urandom tty; do
    touch "dev/$name"
    mount --bind "/dev/$name" "dev/$name"
done
mount -t tmpfs -o mode=1777,size=256m tmpfs dev/shm
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
printf 'root:x:0:0::/:/bin/sh\n' >etc/passwd
printf 'root:x:0:\n' >etc/group
printf 'passwd: files\ngroup: files\n' >etc/nsswitch.conf
printf '0123456789abcdef0123456789abcdef\n' >etc/machine-id
for name in test sysinit basic network-online shutdown local-fs multi-user; do
    printf '[Unit]\nDefaultDependencies=no\n' >"etc/systemd/system/$name.target"
done
ln -s /opt/sources/bench opt/names/beluga_bench
cat >opt/beluga/bin/beluga <<'END'
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/sources:/opt/names:/opt/packages
exec /opt/python/bin/python3 -Bc 'from beluga.cli.main import main; main()' "$@"
END
chmod 755 opt/beluga/bin/beluga
pivot_root . old
umount -l old
cd /
[ -z "$(ls -A /tmp)$(ls -A /old)" ]  # this is the new root, not a path of the machine
cd /opt/sources
eval "$install"
cd /
sed -i 's/--size 1G/--size 24M/' /etc/beluga/beluga.env
printf '[Service]\nStandardOutput=append:/var/output\nStandardError=append:/var/output\n' \
    >/etc/systemd/system/beluga-.service.d/output.conf
ip link set lo up 2>/dev/null || :
exec env -i container=beluga-test SYSTEMD_UNIT_PATH=/etc/systemd/system \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=test.target --log-target=console --show-status=no
"""


class CannotBootError(Exception):
    """This machine cannot run a systemd of its own; the text has the reason."""


def why_not() -> str | None:
    """Return what this machine lacks for a systemd of its own, or None."""
    if os.geteuid() != 0:
        return "a systemd of its own takes root"
    if not SYSTEMD.exists():
        return "no systemd here"
    lacking = [name for name in ("unshare", "nsenter", "pivot_root") if shutil.which(name) is None]
    return f"no {lacking[0]} here" if lacking else None


class Booted:
    """The systemd; ``run`` runs commands under it. Raises CannotBootError."""

    def __init__(self, root: Path) -> None:
        self._log = (root.parent / "systemd.log").open("w+")
        root.mkdir()
        kinds = ("cgroup", "ipc", "mount", "net", "pid", "uts")
        command = ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child"]
        script = ["sh", "-c", _BOOT, "boot", root, sys.base_prefix]
        packages = sysconfig.get_paths()["purelib"]
        self._process = subprocess.Popen(
            [*command, *map(str, script), packages, str(SOURCES), INSTALL],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + BOOT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise CannotBootError(f"systemd cannot run here: {self.log()[-500:]}")
            if self.pid and self.run("systemctl", "is-active", "test.target").stdout == "active\n":
                return
            time.sleep(0.05)
        raise CannotBootError(f"systemd did not come up in {BOOT_S:.0f} s: {self.log()[-500:]}")

    @property
    def pid(self) -> int:
        """The pid on this machine of process 1 of the namespaces; 0 before it has started."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        words = children.read_text().split()
        return int(words[0]) if words else 0

    def log(self) -> str:
        """Return the log of systemd and the services."""
        output = self.run("cat", "/var/output").stdout if self._process.poll() is None else ""
        return Path(self._log.name).read_text() + output

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        enter = ["nsenter", "--target", str(self.pid), "--all"]
        return captured([*enter, "sh", "-c", 'cd / && exec "$@"', "sh", *command], timeout=60)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python inside, as root."""
        return self.run(
            *("env", "LD_LIBRARY_PATH=/opt/python/lib", "/opt/python/bin/python3", "-c", code)
        )

    def as_engine(
        self, *words: str, user: int = 1234, umask: str = "022"
    ) -> subprocess.CompletedProcess[str]:
        """Run ``beluga`` inside, as another user in the group beluga."""
        settings = ["BELUGA_RUNTIME_DIR=/run/beluga", "XDG_STATE_HOME=/tmp", "HOME=/tmp"]
        settings += re.findall(r"BELUGA_POOL=.*", (UNITS / "beluga.env").read_text())
        engine = ["setpriv", f"--reuid={user}", f"--regid={user}", "--groups=beluga"]
        masked = ["sh", "-c", f'umask {umask}; exec "$@"', "sh"]
        return self.run("env", *settings, *engine, *masked, "/opt/beluga/bin/beluga", *words)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def end(self) -> None:
        """Kill all its processes."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)  # --kill-child ends the other processes
        self._process.wait(timeout=60)
        self._log.close()
