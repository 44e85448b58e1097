# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The checks of ``beluga doctor`` of this machine, and how all checks run."""

import re
import resource
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from made_machine import (
    CLOCK,
    DAX,
    DEVICES,
    FEATURES,
    GOOD,
    GPU,
    MIB,
    NVIDIA,
    PAT,
    THP,
    UNREADABLE,
    WQ,
    finding,
    made,
    spoil,
)

from beluga.doctor import Check, Machine, PoolLook, diagnose
from beluga.doctor.checks import CHECKS, run_check
from beluga.doctor.machine import UndeterminedError, Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs/operate/operations.md"


def test_the_table_in_the_documents_has_every_check() -> None:
    section = PAGE.read_text().partition("## Is this machine fit?")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)
    assert named == [check.name for check in CHECKS]


def test_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_check_that_fails_is_a_warning(tmp_path: Path) -> None:
    def fails(machine: Machine) -> Verdict:
        raise ZeroDivisionError("one\ntwo")

    result = run_check(Check("broken", fails), made(tmp_path))
    assert (result.name, result.level) == ("broken", "warning")
    assert result.text == "unknown: this check failed (ZeroDivisionError: one two)"
    assert result.fix


def test_an_impossible_check_is_a_warning(tmp_path: Path) -> None:
    def blind(machine: Machine) -> Verdict:
        raise UndeterminedError("it is dark", "switch the light on")

    result = run_check(Check("blind", blind), made(tmp_path))
    assert (result.level, result.text) == ("warning", "unknown: it is dark")
    assert result.fix == "switch the light on"


def test_a_finding_is_one_line_that_a_terminal_can_show(tmp_path: Path) -> None:
    result = run_check(
        Check("loud", lambda machine: Verdict("error", "a\x1b[31m\nb", "c\td\n")), made(tmp_path)
    )
    assert (result.text, result.fix) == ("a [31m b", "c d")


def test_every_check_returns_a_finding_for_this_machine() -> None:
    results = diagnose(Machine())
    assert [each.name for each in results] == [check.name for check in CHECKS]
    assert [each for each in results if "this check failed" in each.text] == []
    assert [each for each in results if bool(each.fix) != (each.level != "ok")] == []
    assert [each for each in results if "#" in each.fix] == [], "a comment would hide what follows"


class Case(NamedTuple):
    """A check's name, the difference from a good machine, and the expected finding."""

    name: str
    changes: dict[str, str | None]
    facts: dict[str, Any]
    level: str
    text: str
    fix: str = ""


def cpuinfo(flags: str) -> dict[str, str | None]:
    return {"proc/cpuinfo": f"vendor_id : AuthenticAMD\nflags : {flags}\n"}


def without(*names: str) -> dict[str, Any]:
    return {"features": FEATURES - set(names)}


def no_usage(folder: Path) -> tuple[int, int]:
    raise FileNotFoundError(2, "No such file or directory", str(folder))


ARM: dict[str, Any] = {"arch": "aarch64", "features": frozenset()}
ASIMD: dict[str, str | None] = {"proc/cpuinfo": "Features : fp asimd\n"}
GUEST = cpuinfo("hypervisor")
BARE = cpuinfo("fpu")
CANNOT = "unknown: "
GROUP = "sys/fs/cgroup/engine"
MEMLOCK, NOFILE = resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE
INFINIBAND = "sys/class/infiniband"
PEERMEM = "sys/module/nvidia_peermem"

CASES = [
    Case("cpu-flush", GUEST, without("clflushopt"), "warning", "clflush drops", "-cpu host"),
    Case("cpu-flush", BARE, without("clflushopt"), "warning", "clflush drops", "use a CPU"),
    Case("cpu-flush", {}, without("clflushopt"), "warning", "", "unset BELUGA_FLUSH"),
    Case("cpu-flush", BARE, without("clwb"), "ok", "without clwb"),
    Case("cpu-flush", {"proc/cpuinfo": None}, without("clwb"), "warning", CANNOT, "mount -t proc"),
    Case("cpu-flush", {}, {"arch": "aarch64"}, "ok", "aarch64: dc civac"),
    Case("cpu-copy", {}, {**ARM, "features": frozenset({"neon"})}, "ok", "stnp streams 32"),
    Case("cpu-copy", ASIMD, ARM, "warning", "16 bytes", "unset BELUGA_ISA"),
    Case("cpu-checksums", ASIMD, ARM, "warning", "checksums take", "use a CPU"),
    Case("cpu-checksums", {}, {**ARM, "features": frozenset({"crc32"})}, "ok", "crc32c"),
    Case("tsc", {}, ARM, "ok", "virtual counter"),
    Case("cpu-copy", {}, {}, "ok", "movdir64b"),
    Case("cpu-copy", BARE, without("movdir64b"), "ok", "avx512 streams whole lines"),
    Case("cpu-copy", BARE, without("avx512"), "ok", "avx2 streams half lines"),
    Case("cpu-copy", BARE, without("avx2", "avx512"), "warning", "sse2", "use a CPU"),
    Case("cpu-copy", {}, without("avx512"), "warning", "excludes avx512", "unset BELUGA_ISA"),
    Case("cpu-copy", {"proc/cpuinfo": UNREADABLE}, without("avx2"), "warning", CANNOT, "ls -l"),
    Case("cpu-checksums", {}, {}, "ok", "vpclmul"),
    Case("cpu-checksums", BARE, without("pclmul"), "warning", "pclmul is not used", "use a CPU"),
    Case("cpu-checksums", {}, without("sse4.2"), "warning", "sse4.2", "unset BELUGA_ISA"),
    Case("clocksource", {f"{CLOCK}/current_clocksource": "kvm-clock\n"}, {}, "ok", "kvm-clock"),
    Case(
        "clocksource", {f"{CLOCK}/current_clocksource": "hpet\n"}, {}, "warning", "hpet",
        f"echo tsc | sudo tee /{CLOCK}/current_clocksource",
    ),
    Case(
        "clocksource",
        {f"{CLOCK}/current_clocksource": "hpet\n", f"{CLOCK}/available_clocksource": "hpet\n"},
        {}, "warning", "hpet", "tsc=reliable",
    ),
    Case("clocksource", {f"{CLOCK}/current_clocksource": None}, {}, "warning", CANNOT, "sysfs"),
    Case("clocksource", {f"{CLOCK}/current_clocksource": "\x00"}, {}, "warning", CANNOT, "cat /"),
    Case("tsc", cpuinfo("constant_tsc hypervisor"), {}, "warning", "no nonstop_tsc", "+invtsc"),
    Case("tsc", BARE, {}, "warning", "no constant_tsc and no nonstop_tsc", "use a CPU"),
    Case("tsc", {"proc/cpuinfo": UNREADABLE}, {}, "warning", CANNOT, "ls -l /proc/cpuinfo"),
    Case("huge-pages", {f"{THP}/enabled": "always madvise [never]"}, {}, "warning", "4 KiB",
         f"echo madvise | sudo tee /{THP}/enabled"),
    Case("huge-pages", {f"{THP}/enabled": "often"}, {}, "warning", CANNOT, "cat /"),
    Case("huge-pages", {f"{THP}/enabled": None}, {}, "warning", CANNOT, "sysfs"),
    Case("huge-pages", {"proc/self/status": "THP_enabled:\t0\n"}, {}, "error", "SIGBUS",
         "PR_SET_THP_DISABLE"),
    Case("huge-pages-shm", {f"{THP}/shmem_enabled": "never deny [force]"}, {}, "ok", "force"),
    Case("huge-pages-shm", {f"{THP}/shmem_enabled": "never [deny] force"}, {}, "warning", "deny",
         "tee"),
    Case("huge-pages-shm", {f"{THP}/shmem_enabled": None}, {}, "warning", CANNOT, "sysfs"),
    Case("huge-pages-shm", {f"{THP}/shmem_enabled": UNREADABLE}, {}, "warning", CANNOT, "ls -l"),
    *(
        Case(
            "huge-pages-shm",
            {"proc/self/mountinfo": f"30 25 0:26 / /dev/shm rw - tmpfs tmpfs rw{option}\n"},
            {}, "warning", "4 KiB", "remount,huge=within_size",
        )
        # A pool's pages are allocated before they are mapped, so advice comes too late.
        for option in ("", ",huge=never", ",huge=advise")
    ),
    Case("huge-pages-shm", {"proc/self/mountinfo": "x - y\n\n"}, {}, "warning", "no file system",
         "mount -t tmpfs"),
    Case("shm-space", {}, {"usage": lambda _: (64 * MIB, MIB)}, "warning", "--shm-size", "size="),
    Case("shm-space", {}, {"usage": no_usage}, "warning", "has no size", "mount -t tmpfs"),
    Case(
        "cgroup-memory",
        {
            "proc/self/cgroup": "0::/engine\n",
            f"{GROUP}/memory.max": f"{512 * MIB}\n",
            f"{GROUP}/memory.current": f"{100 * MIB}\n",
        },
        {}, "warning", "control group engine leaves 412 MiB", "MemoryMax",
    ),
    Case(
        "cgroup-memory",
        {
            "proc/self/cgroup": "0::/engine\n",
            f"{GROUP}/memory.max": f"{64 << 30}\n",
            f"{GROUP}/memory.current": "0\n",
        },
        {}, "ok", "leaves 64 GiB",
    ),
    Case("cgroup-memory", {"proc/self/cgroup": "0::/engine\n", f"{GROUP}/memory.max": "max"}, {},
         "ok", "no control group"),
    Case("max-map-count", {"proc/sys/vm/max_map_count": "1024\n"}, {}, "warning", "1024",
         "sysctl -w vm.max_map_count"),
    Case("max-map-count", {"proc/sys/vm/max_map_count": "-5"}, {}, "warning", "'-5'", "cat /"),
    Case("max-map-count", {"proc/sys/vm/max_map_count": "9" * 5000}, {}, "warning", CANNOT, "cat"),
    Case("max-map-count", {"proc/sys/vm/max_map_count": None}, {}, "warning", CANNOT, "mount"),
    Case("max-map-count", {"proc/sys/vm/max_map_count": UNREADABLE}, {}, "warning", CANNOT, "ls"),
    Case("locked-memory", {}, {"limits": {MEMLOCK: None}}, "ok", "all memory"),
    Case("locked-memory", {}, {"limits": {MEMLOCK: 64 << 10}}, "warning", "64 KiB", "ulimit -l"),
    Case("locked-memory", {}, {"limits": {MEMLOCK: 0}, "uid": 0}, "ok", "all memory"),
    Case("locked-memory", {}, {"packages": {"mooncake-transfer-engine": "0.3"}}, "warning",
         "Mooncake", "ulimit -l unlimited"),
    Case("open-files", {}, {"limits": {NOFILE: 256}}, "warning", "needs 1024", "ulimit -n 65536"),
    Case("open-files", {}, {"limits": {NOFILE: None}}, "ok", "any number"),
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": "2\n"}, {}, "warning", "all users",
         "kernel.io_uring_disabled=0"),
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": "1\n"}, {}, "warning", "group", "="),
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": "1\n"}, {"uid": 0}, "ok", ""),
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": "?"}, {}, "warning", CANNOT, "cat"),
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": None}, {}, "ok", "6.12"),
    *(
        Case(
            "io-uring",
            {"proc/sys/kernel/io_uring_disabled": None, "proc/sys/kernel/osrelease": release},
            {}, "warning", text, fix,
        )
        for release, text, fix in (
            ("4.18.0\n", "no io_uring", "kernel 5.1"),
            ("new", CANNOT, "uname -r"),
            (None, CANNOT, "mount -t proc"),
        )
    ),
    # The smallest sufficient value.
    Case("io-uring", {"proc/sys/kernel/io_uring_disabled": None,
                      "proc/sys/kernel/osrelease": "5.1.0\n"}, {}, "ok", "5.1"),
    Case("locked-memory", {}, {"limits": {MEMLOCK: 8 * MIB}}, "ok", "8 MiB"),
    Case("open-files", {}, {"limits": {NOFILE: 1024}}, "ok", "1024"),
    Case("shm-space", {}, {"usage": lambda _: (1 << 30, 0)}, "ok", "0 bytes of 1 GiB"),
    Case("gpu-driver", {NVIDIA: "NVRM version: NVIDIA  525.60.13 "}, {}, "ok", "525, for CUDA 12"),
    Case("nvrtc", {}, {"packages": {}}, "ok", "NVRTC of a toolkit"),
    Case("devdax", {f"{DAX}/driver->": "sys/bus/dax/drivers/kmem"}, {}, "warning",
         "the kernel uses it as its own memory", "daxctl reconfigure-device --mode=devdax dax0.0"),
    Case("devdax", {f"{DAX}/driver->": "sys/bus/dax/drivers/kmem"},
         {"pool": PoolLook(("/dev/dax0.0",))}, "error", "its own memory",
         "daxctl reconfigure-device --mode=devdax dax0.0"),
    Case("devdax", {f"{DAX}/driver->": None}, {}, "warning", "no driver is bound", "daxctl reconf"),
    Case("devdax", {f"{DAX}/align": f"{1 << 30}\n"}, {}, "warning", "1 GiB", "--align=2M dax0.0"),
    Case("devdax", {f"{DAX}/size": UNREADABLE}, {}, "warning", "cannot be read", "daxctl list"),
    Case("devdax", {f"{DAX}/size": "many"}, {}, "warning", "contains 'many'", "daxctl list"),
    Case("devdax", {f"{DAX}/dev": "x:y"}, {}, "warning", "no device number", "daxctl list"),
    Case("devdax", {"sys/bus/dax": None}, {}, "ok", "no devdax device"),
    Case("devdax-access", {"dev/dax0.0": None}, {}, "warning", "no /dev/dax0.0", "udevadm"),
    Case("devdax-access", {"dev/dax0.0": None}, {"pool": PoolLook(("/dev/dax0.0",))}, "error",
         "no /dev/dax0.0", "udevadm"),
    Case("devdax-access", {f"{DAX}/driver->": None}, {}, "ok", "no devdax device to open"),
    Case("memory-type", {"sys/bus/dax": None}, {}, "ok", "no devdax device"),
    Case("memory-type", {PAT: "PAT: [mem 0x100000000-0x110000000] uncached-minus\n"}, {}, "error",
         "dax0.0 is uncacheable", "export BELUGA_MEMORY=uncacheable"),
    Case("memory-type", {PAT: "PAT: [mem 0x100000000-0x110000000] write-combining\n"}, {}, "error",
         "write-combining", "firmware"),
    Case(
        "memory-type",
        {"proc/mtrr": "reg01: base=0x100000000 ( 4096MB), size= 256MB, count=1: uncachable\n"},
        {}, "error", "uncacheable", "",
    ),
    Case("memory-type", {PAT: UNREADABLE}, {}, "warning", CANNOT, "sudo beluga doctor"),
    Case("memory-type", {PAT: None, "proc/mtrr": None}, {}, "warning", CANNOT, "debugfs"),
    Case("memory-type", {f"{DAX}/resource": "0x0\n"}, {}, "warning", CANNOT, "sudo beluga doctor"),
    Case("memory-type", {f"{DAX}/resource": "here"}, {}, "warning", CANNOT, "cat /"),
    Case("memory-type", {f"{DAX}/resource": None}, {}, "warning", CANNOT, ""),
    Case("ddio", {}, {}, "warning", CANNOT + "user space cannot read it", "export BELUGA_DDIO=on"),
    Case("ddio", dict.fromkeys(DEVICES), {}, "ok", "does not matter"),
    Case("dsa-queues", {f"{WQ}/state": "disabled\n"}, {}, "warning", "wq0.0 is disabled",
         "accel-config config-wq dsa0/wq0.0"),
    Case("dsa-queues", {f"{WQ}/size": "?"}, {}, "warning", "no size", "accel-config"),
    Case("dsa-queues", {WQ: None}, {}, "warning", "has a work queue", "accel-config enable-wq"),
    Case("dsa-queues", {"sys/bus/dsa": None}, {}, "warning", "may have a DSA", "modprobe idxd"),
    Case("dsa-queues", {"sys/bus/dsa": None}, without("enqcmd"), "ok", "no DSA"),
    Case("dsa-access", {"dev/dsa/wq0.0": None}, {}, "warning", "no /dev/dsa/wq0.0", "idxd"),
    Case("dsa-access", {"sys/bus/dsa": None}, {}, "ok", "no DSA queue"),
    Case("gpu-driver", {}, {}, "ok", "driver 580, for CUDA 13"),
    Case("gpu-driver", {NVIDIA: "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                        "570.86.15  Release Build\n"}, {}, "ok", "570, for CUDA 12"),
    Case("gpu-driver", {NVIDIA: "NVRM version: NVIDIA  470.57.02 "}, {}, "warning", "old", "or"),
    Case("gpu-driver", {NVIDIA: None}, {}, "warning", "1 NVIDIA GPUs", "modprobe nvidia"),
    Case("gpu-driver", {NVIDIA: None, GPU: None}, {}, "ok", "no NVIDIA GPU"),
    Case("gpu-driver", {NVIDIA: None, f"{GPU}/class": "0x020000"}, {}, "ok", "no NVIDIA GPU"),
    Case("gpu-driver", {NVIDIA: "none"}, {}, "warning", CANNOT, "nvidia-smi"),
    Case("gpu-driver", {NVIDIA: UNREADABLE}, {}, "warning", CANNOT, "ls -l"),
    Case("nvrtc", {}, {"no_engine": "no NVRTC"}, "warning", "no NVRTC", "'beluga-kv[cuda13]'"),
    Case("nvrtc", {NVIDIA: "NVRM version: NVIDIA  550.57.02 "}, {}, "warning", "from 580 on",
         "'beluga-kv[cuda12]'"),
    Case("nvrtc", {NVIDIA: None}, {"packages": {}}, "ok", "not needed"),
    Case("gpu-peer", {PEERMEM: None}, {}, "warning", "host memory", "modprobe nvidia_peermem"),
    Case("gpu-peer", {INFINIBAND: None}, {}, "ok", "no RDMA adapter"),
    Case("gpu-peer", {NVIDIA: None}, {}, "ok", "no GPU"),
    Case("vllm", {}, {"packages": {}}, "ok", "not in this environment"),
    Case("vllm", {}, {"packages": {"vllm": "0.31.2"}}, "warning", "0.31.2", "'vllm>=0.32,<0.34'"),
    Case("vllm", {}, {"packages": {"vllm": "0.34.0"}}, "warning", "not tested", "vllm>=0.32"),
    Case("vllm", {}, {"packages": {"vllm": "0.32.0rc1"}}, "warning", "not tested", "vllm>=0.32"),
    Case("vllm", {}, {"packages": {"vllm": "dev"}}, "warning", CANNOT, "pip install"),
    Case("vllm", {}, {"packages": {"vllm": "0.33.9+cu130"}}, "ok", "0.33.9"),
    Case("sglang", {}, {"packages": {"sglang": "0.5.19"}}, "error", "refuses", "sglang>=0.5.20"),
    Case("sglang", {}, {"packages": {"sglang": "1.0"}}, "ok", "1.0"),
    Case("lmcache", {}, {"packages": {"lmcache": "0.4.9"}}, "warning", "", "lmcache>=0.5.6,<0.6"),
    Case("zmq", {}, {}, "ok", "pip install 'beluga-kv[router]'"),
    Case("zmq", {}, {"packages": {"pyzmq": "27"}}, "ok", "pyzmq 27"),
    Case("redis", {}, {"packages": {"redis": "8"}, "broken": {"redis": "ImportError: x"}},
         "warning", "ImportError: x", "--force-reinstall redis"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{CASES.index(case)}")
def test_each_check_reports_its_finding(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("BELUGA_MEMORY", "BELUGA_DDIO", "BELUGA_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    result = finding(case.name, made(tmp_path, case.changes, **case.facts))
    assert result.level == case.level, result
    assert case.text in result.text, result
    assert case.fix in result.fix, result
    assert bool(result.fix) == (result.level != "ok")


def test_a_good_machine_has_no_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELUGA_DDIO", "off")  # no other file shows it
    assert [each for each in diagnose(made(tmp_path)) if each.level != "ok"] == []


@pytest.mark.parametrize(
    ("values", "level", "fix"),
    [
        ("uncacheable", "error", "unset BELUGA_MEMORY"),
        ("write-back", "ok", ""),
        ("cached", "error", "unset BELUGA_MEMORY"),
    ],
)
def test_settings_of_the_environment_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: str, level: str, fix: str
) -> None:
    monkeypatch.setenv("BELUGA_MEMORY", values)
    result = finding("memory-type", made(tmp_path))
    assert (result.level, result.fix) == (level, fix), result


def test_a_given_ddio_setting_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELUGA_DDIO", "off")
    assert finding("ddio", made(tmp_path)).text == "off, set by BELUGA_DDIO"


def test_several_devices_are_one_finding(tmp_path: Path) -> None:
    second = DAX.replace("dax0.0", "dax1.0")
    also = {name.replace(DAX, second): text for name, text in GOOD.items() if DAX in name}
    also |= {f"{second}/dev": "252:8\n", f"{second}/driver->": "sys/bus/dax/drivers/kmem"}
    result = finding("devdax", made(tmp_path, {**also, f"{DAX}/driver->": None}))
    assert result.level == "warning"
    assert result.fix == " && ".join(
        f"daxctl reconfigure-device --mode=devdax dax{number}.0" for number in (0, 1)
    )


def test_files_that_a_user_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = made(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    results = {name: finding(name, machine) for name in ("devdax-access", "dsa-access")}
    assert {each.level for each in results.values()} == {"warning"}
    assert results["devdax-access"].fix == "sudo setfacl -m u:1000:rw /dev/dax0.0"
    assert results["dsa-access"].fix == "sudo setfacl -m u:1000:rw /dev/dsa/wq0.0"


def test_a_file_of_root_advises_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, opened = made(tmp_path), Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "pat_memtype_list":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    result = finding("memory-type", machine)
    assert (result.level, result.fix) == ("warning", "sudo beluga doctor")
    assert "this user may not read" in result.text


HOSTILE = ["", "\x00\xff\n", "-1", "9" * 400, "[", "]x[", "a b\nc: d - e\n" * 50, UNREADABLE, None]


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_arbitrary_file_contents_do_not_break_a_check(tmp_path: Path, hostile: str | None) -> None:
    """Each file in turn has such content; the check reports what it can and does not fail
    itself.
    """
    for number, name in enumerate(GOOD):
        root = tmp_path / str(number)
        machine = made(root)
        spoil(root, {name: None if name.endswith("->") else hostile})
        results = diagnose(machine)
        assert [each.name for each in results] == [check.name for check in CHECKS]
        assert [each for each in results if "this check failed" in each.text] == [], name


def test_an_empty_root_is_examined_without_a_failure(tmp_path: Path) -> None:
    machine = made(tmp_path / "made")
    empty = tmp_path / "empty"
    empty.mkdir()
    results = {each.name: each for each in diagnose(type(machine)(root=empty))}
    assert [each for each in results.values() if "this check failed" in each.text] == []
    assert results["max-map-count"].text == "unknown: there is no /proc/sys/vm/max_map_count"
