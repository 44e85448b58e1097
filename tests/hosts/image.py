# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes the boot image of a guest: Debian's kernel, and a small initial file system with its
modules and busybox. Nothing is installed on this machine: the package is fetched and unpacked into
a scratch directory, and the needed files are kept under build/ for the next run. The guest's own
programs (the Python that runs this, Beluga) come from this machine's file system, which the guest
sees read-only.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build/two-hosts"
PACKAGES = ("qemu-system-x86", "busybox-static", "cpio", "kmod")
META_PACKAGE = "linux-image-amd64"  # depends on the newest kernel
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "device_dax", "dax_hmem")
LINES_FROM_HOST = "/dev/ttyS1"

# The first program. The first line on the second serial port is the command to run. A kernel from
# 6.3 on leaves soft-reserved devdax devices without a driver: the program binds them.
INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "no module $module"; done </modules/list
for entry in /sys/bus/dax/devices/*; do
    [ -e "$entry/driver" ] || echo "${{entry##*/}}" >/sys/bus/dax/drivers/device_dax/new_id
done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 hostroot /host ||
    echo "no file system of the machine"
for place in proc sys dev; do mount --move "/$place" "/host/$place"; done
mkdir -p /host/dev/shm
mount -t tmpfs shm /host/dev/shm
exec 3<>/host{LINES_FROM_HOST}
stty raw -echo 115200 <&3
echo up >&3
read -r command <&3
exec chroot /host /bin/sh -c "$command"
"""


class UnavailableError(Exception):
    """Guests cannot run here; the text is one line with the reason."""


@dataclass(frozen=True, slots=True)
class Image:
    """The kernel and the file system that QEMU boots."""

    kernel: Path
    initrd: Path
    made: bool  # just now, not found


def image() -> Image:
    """Return the boot image, which is made if it does not exist yet. Raises UnavailableError."""
    _run(ROOT / "scripts/dev/setup-packages", *PACKAGES)
    folder = CACHE / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    made = not folder.exists()
    if made:
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unpack-", dir=CACHE) as scratch:
            ready = _make(_kernel_package(Path(scratch)), Path(scratch))
            try:
                ready.rename(folder)
            except OSError:  # another run has made it meanwhile
                if not folder.exists():
                    raise
    return Image(folder / "vmlinuz", folder / "initrd", made)


def _kernel_package(scratch: Path) -> Path:
    """Fetch the newest kernel's package."""
    try:
        _fetch(scratch)
    except UnavailableError:  # apt's lists are old or missing
        _run("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "update")
        _fetch(scratch)
    (package,) = scratch.glob("*.deb")
    return package


def _fetch(scratch: Path) -> None:
    listing = _run("apt-cache", "depends", META_PACKAGE).decode()
    names = [line.split()[1] for line in listing.splitlines() if "Depends: linux-image-" in line]
    if not names:
        raise UnavailableError(f"apt-cache knows no kernel that {META_PACKAGE} depends on")
    _run("apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", names[0], cwd=scratch)


def _make(package: Path, scratch: Path) -> Path:
    """Make a directory with the kernel and the initial file system."""
    root = scratch / "root"
    _run("dpkg", "-x", package, root)
    (modules,) = (root / "lib/modules").iterdir()
    _run("depmod", "-b", root, modules.name)
    tree = scratch / "initrd.tree"
    for name in ("bin", "dev", "proc", "sys", "host", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(shutil.which("busybox") or "/bin/busybox", tree / "bin/busybox")
    ordered = _in_order(modules)
    for module in ordered:
        shutil.copy(module, tree / "modules")
    (tree / "modules/list").write_text("".join(f"{module.name}\n" for module in ordered))
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    ready = scratch / "ready"
    ready.mkdir()
    names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    packed = _run("cpio", "--quiet", "-o", "-H", "newc", cwd=tree, stdin="\n".join(names).encode())
    (ready / "initrd").write_bytes(gzip.compress(packed, 1))
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    shutil.copy(kernel, ready / "vmlinuz")
    return ready


def _in_order(modules: Path) -> list[Path]:
    """Return the modules and their dependencies, each after its own dependencies."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, needed = line.partition(":")
        needs[name] = needed.split()
    by_name = {Path(name).name.partition(".")[0]: name for name in needs}
    ordered: list[str] = []

    def add(name: str) -> None:
        for needed in needs[name]:
            add(needed)
        if name not in ordered:
            ordered.append(name)

    for wanted in MODULES:
        add(by_name[wanted])
    return [modules / name for name in ordered]


def _run(*command: str | os.PathLike[str], cwd: Path = ROOT, stdin: bytes = b"") -> bytes:
    """Return the command's output. Raises UnavailableError if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, input=stdin, capture_output=True, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise UnavailableError(f"{Path(command[0]).name}: {last}")
    return done.stdout
