# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of devices: devdax nodes, work queues of DSA, GPUs."""

from __future__ import annotations

import re

from beluga.doctor.finding import UndeterminedError, Verdict, error, ok, unknown, warning, worst
from beluga.doctor.machine import Machine
from beluga.errors import PoolError
from beluga.pool import dax_nodes, show_size
from beluga.transfer import why_no_queue, work_queues

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI's numbers of a vendor and of a class
_CUDA12, _CUDA13 = 525, 580  # the first drivers for them
_CUPY_LEAST = 14
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def quoted_command(failure: Exception) -> str | None:
    """Return the command in quotes in an error's text."""
    found = re.search(r"'((?:daxctl|ulimit|truncate) [^']+)'", str(failure))
    return found[1] if found else None


def _in_pool(machine: Machine, name: str) -> bool:
    return any(spec.real_path.name == name for spec in machine.pool.specs)


def check_devdax(machine: Machine) -> Verdict:
    """Check the driver, the alignment and the size of every devdax device."""
    nodes = dax_nodes(machine.root / "sys")
    if not nodes:
        return ok("there is no devdax device; pools lie in files")
    verdicts = []
    for name, node in nodes.items():
        if isinstance(node, PoolError):
            verdict = error if _in_pool(machine, name) else warning
            fix = quoted_command(node) or f"daxctl list -u -d {name}"
            verdicts.append(verdict(str(node), fix))
    good = {name: node for name, node in nodes.items() if not isinstance(node, PoolError)}
    shown = ", ".join(f"{name} ({show_size(node.size)})" for name, node in good.items())
    return worst(verdicts, f"device_dax drives {shown}")


def check_devdax_access(machine: Machine) -> Verdict:
    """Check the permissions of the devdax devices that are suitable for a pool."""
    usable = [
        name
        for name, node in dax_nodes(machine.root / "sys").items()
        if not isinstance(node, PoolError)
    ]
    if not usable:
        return ok("there is no devdax device to open")
    verdicts = []
    for name in usable:
        verdict = error if _in_pool(machine, name) else warning
        if not (machine.root / "dev" / name).exists():
            verdicts.append(verdict(f"there is no /dev/{name}", "sudo udevadm trigger -s dax"))
        elif not machine.may_use(f"dev/{name}"):
            text = f"this user may not read and write /dev/{name}"
            verdicts.append(verdict(text, f"sudo setfacl -m u:{machine.uid}:rw /dev/{name}"))
    return worst(verdicts, f"this user may read and write {', '.join(usable)}")


def check_dsa_queues(machine: Machine) -> Verdict:
    """Check for a work queue of an Intel DSA."""
    root = machine.root / "sys/bus/dsa/devices"
    why = why_no_queue(root)
    if why is None:
        names = ", ".join(queue.name for queue in work_queues(root) if queue.fault is None)
        return ok(f"queues that programs may use: {names}")
    text, _, fix = why.partition("; as root: ")
    if fix:
        return warning(text, fix)
    if "enqcmd" in machine.features:  # of CPUs with a DSA
        return warning(
            "this CPU may have a DSA, but the kernel shows none; the CPU copies",
            "add intel_iommu=on,sm_on to the kernel's command line, and modprobe idxd",
        )
    return ok("this CPU has no DSA (no enqcmd); the CPU copies")


def check_dsa_access(machine: Machine) -> Verdict:
    """Check the permissions of the work queues."""
    queues = [q for q in work_queues(machine.root / "sys/bus/dsa/devices") if q.fault is None]
    if not queues:
        return ok("there is no DSA queue to open")
    verdicts = []
    for name in (queue.name for queue in queues):
        if not (machine.root / "dev/dsa" / name).exists():
            verdicts.append(warning(f"there is no /dev/dsa/{name}", "sudo modprobe idxd"))
        elif not machine.may_use(f"dev/dsa/{name}"):
            text = f"this user may not read and write /dev/dsa/{name}"
            verdicts.append(warning(text, f"sudo setfacl -m u:{machine.uid}:rw /dev/dsa/{name}"))
    names = ", ".join(queue.name for queue in queues)
    return worst(verdicts, f"this user may submit to {names}")


def _gpu_count(machine: Machine) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus."""
    count = 0
    for name in machine.names("sys/bus/pci/devices"):
        entry = f"sys/bus/pci/devices/{name}"
        vendor, kind = machine.read_if(f"{entry}/vendor"), machine.read_if(f"{entry}/class")
        count += vendor == _NVIDIA and (kind or "").startswith(_DISPLAY)
    return count


def _driver(machine: Machine) -> int | None:
    """Return the main version of NVIDIA's driver; None if it is not loaded."""
    text = machine.read_if("proc/driver/nvidia/version")
    if text is None:
        return None
    found = re.search(r"NVRM version:.*?\s(\d{3,6})\.\d+", text)
    if found is None:
        raise UndeterminedError("/proc/driver/nvidia/version names no version", "nvidia-smi")
    return int(found[1])


def check_gpu_driver(machine: Machine) -> Verdict:
    """Check NVIDIA's driver."""
    count, driver = _gpu_count(machine), _driver(machine)
    if driver is None:
        if count == 0:
            return ok("there is no NVIDIA GPU; the CPU copies")
        return warning(
            f"{count} NVIDIA GPUs are plugged in, but their driver is not loaded",
            "sudo modprobe nvidia",
        )
    if driver < _CUDA12:
        return warning(
            f"NVIDIA's driver {driver} is too old for CUDA 12 and cupy",
            "update the driver to 580 or later",
        )
    return ok(f"NVIDIA's driver {driver}, for CUDA {13 if driver >= _CUDA13 else 12}")


def check_cupy(machine: Machine) -> Verdict:
    """Check for the package that the CUDA engine needs."""
    driver = _driver(machine)
    if driver is None:
        return ok("without a GPU's driver cupy is not needed")
    cuda = 13 if driver >= _CUDA13 else 12
    fix = f"pip install 'beluga-kv[cuda{cuda}]'"
    why = machine.why_no_engine("cuda")
    if why is None and (failed := machine.why_no_import("cupy")) is not None:
        why = f"cupy cannot be imported ({failed})"
    if why is not None:
        return warning(f"{why}; without it blocks go through host memory", fix)
    name, version = next(
        ((name, found) for name in _CUPY if (found := machine.version(name)) is not None),
        ("cupy", ""),
    )
    major = version.partition(".")[0]
    if not major.isdecimal():
        return unknown(f"cupy is importable, but its version is {version!r}", "pip show cupy")
    if name == "cupy-cuda13x" and cuda < 13:
        return warning(f"{name} needs a driver from {_CUDA13} on; this is {driver}", fix)
    if int(major) < _CUPY_LEAST:
        return warning(
            f"{name} {version} has no streams with priorities", f"pip install -U '{name}>=14'"
        )
    return ok(f"{name} {version}")


def check_gpu_peer(machine: Machine) -> Verdict:
    """Check whether RDMA adapters can read GPU memory."""
    if _driver(machine) is None:
        return ok("there is no GPU")
    if not machine.names("sys/class/infiniband"):
        return ok("GPUs reach the pool through this host's mapping; there is no RDMA adapter")
    if machine.names("sys/module/nvidia_peermem"):
        return ok("RDMA adapters reach GPU memory (nvidia_peermem)")
    return warning(
        "RDMA adapters reach GPU memory only by way of host memory (nvidia_peermem is not "
        "loaded); this concerns remote tiers only",
        "sudo modprobe nvidia_peermem",
    )
