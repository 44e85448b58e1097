# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Read the environment; no other file of the package does.

=================== ==============================================================================
variable            meaning
=================== ==============================================================================
BELUGA_CONFIG       the file that commands read in place of the user's and the machine's beluga.toml
BELUGA_LOG_LEVEL    the lowest level that commands log: debug, info, warning or error
BELUGA_LOG_FORMAT   how commands log: text or json
SHELL               this user's shell, whose completion is printed
BELUGA_POOL         devices of the default pool, joined by ``:``
BELUGA_ISA          instructions to copy with: sse2, avx2, avx512, movdir64b; aarch64: stnp, neon
BELUGA_CRASH        tests: the armed crash point, ``NAME[:PASSAGE][:ACT]``; kill or stop
BELUGA_FLUSH        how lines are flushed: clflush or clflushopt; aarch64: civac
BELUGA_MEMORY       how the pool's memory is mapped: write-back or uncacheable
BELUGA_DDIO         whether devices write into this host's cache: on, off or unknown
BELUGA_RUNTIME_DIR  where lock files of all pools lie; else beside a file, or as below
AWS_ENDPOINT_URL    and AWS_ENDPOINT_URL_S3: where the stores of s3:// answer
STORAGE_EMULATOR_   HOST: an emulator of GCS, in place of the stores of gs://
AZURE_STORAGE_      CONNECTION_STRING, ENDPOINT and USE_EMULATOR: the account of az://
AZURITE_BLOB_       STORAGE_URL: the emulator of az://
NOTIFY_SOCKET       where a server reports that it is ready, set by systemd for services
WATCHDOG_USEC       how often, in microseconds, WATCHDOG_PID must notify systemd
XDG_CONFIG_HOME     where the user's beluga/beluga.toml lies; else ~/.config
XDG_CACHE_HOME      the cache of reproducible data (digests of weights); else ~/.cache
HF_HUB_CACHE        where the hub's client keeps models; else below HF_HOME or ~/.cache
VLLM_USE_MODELSCOPE and SGLANG_USE_MODELSCOPE: the engine's models come from another hub
VLLM_*, SGLANG_*    engines' settings, which are a part of the identity of their blocks
XDG_STATE_HOME      where the mounted default pool is stored; else ~/.local/state
XDG_RUNTIME_DIR     where lock files of devdax pools lie if /run/beluga cannot be written
=================== ==============================================================================
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

from beluga import conventions
from beluga.errors import SettingsError

_preferred_pool: list[str] = []


def pool_paths() -> list[str]:
    """Return the devices in BELUGA_POOL, or else the preferred ones; there may be none."""
    return environment_pool_paths() or list(_preferred_pool)


def environment_pool_paths() -> list[str]:
    """Return the devices in BELUGA_POOL; there may be none. Raises SettingsError."""
    text = os.environ.get("BELUGA_POOL", "")
    paths = [path for path in text.split(":") if path]
    if text and not paths:
        raise SettingsError(f"BELUGA_POOL is {text!r}; give PATH:PATH, or unset it")
    return paths


def prefer_pool(paths: list[str]) -> None:
    """Use these devices in this process unless the user or BELUGA_POOL specifies others."""
    _preferred_pool[:] = paths


def settings_file() -> Path | None:
    """Return the beluga.toml of BELUGA_CONFIG; it may not exist."""
    value = os.environ.get("BELUGA_CONFIG")
    return Path(value) if value else None


def settings_paths() -> tuple[Path, ...]:
    """Return the default locations of beluga.toml; the first that exists is used."""
    home = os.environ.get("XDG_CONFIG_HOME")
    of_user = (Path(home) if home else _home() / ".config") / "beluga/beluga.toml"
    return (of_user, conventions.SETTINGS / "beluga.toml")


def copy_settings() -> dict[str, int]:
    """Return the table ``[copy]`` of beluga.toml: sizes in bytes by name.

    The settings affect only the speed of copies, and an engine must start with any file. So a file
    that cannot be read has none, and other values are skipped; commands report what is wrong.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    path = settings_file() or next((path for path in settings_paths() if path.is_file()), None)
    try:
        table = {} if path is None else tomllib.loads(path.read_text()).get("copy", {})
        return {
            name.replace("_", "-"): size
            for name, size in table.items()
            if type(size) is int and size >= 0
        }
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def log_level() -> str | None:
    """Return the level of BELUGA_LOG_LEVEL, unchecked."""
    return os.environ.get("BELUGA_LOG_LEVEL") or None


def log_format() -> str | None:
    """Return the format of BELUGA_LOG_FORMAT, unchecked."""
    return os.environ.get("BELUGA_LOG_FORMAT") or None


def shell() -> str:
    """Return the name of this user's shell, such as bash; "" if it is not set."""
    return Path(os.environ.get("SHELL", "")).name


def isa() -> str | None:
    """Return the instruction set of BELUGA_ISA, unchecked."""
    return os.environ.get("BELUGA_ISA") or None


def flush() -> str | None:
    """Return the flush of BELUGA_FLUSH, unchecked."""
    return os.environ.get("BELUGA_FLUSH") or None


def memory_type() -> str | None:
    """Return the memory type of BELUGA_MEMORY, unchecked."""
    return os.environ.get("BELUGA_MEMORY") or None


def ddio() -> str | None:
    """Return the value of BELUGA_DDIO, unchecked."""
    return os.environ.get("BELUGA_DDIO") or None


def crash() -> str | None:
    """Return the crash point that BELUGA_CRASH arms, unchecked."""
    return os.environ.get("BELUGA_CRASH") or None


def _home() -> Path:
    """Return this user's home directory; / for a user without a name and HOME, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def state_dir() -> Path:
    """Return the directory of this user's state; it may not exist."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else _home() / ".local/state") / "beluga"


def cache_dir() -> Path:
    """Return the directory of this machine's measurements and compiled files; it may not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else _home() / ".cache") / "beluga"


def other_hub() -> str:
    """Return the variable by which this process's engine uses another hub than Hugging Face, or
    "".
    """
    names = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
    yes = {"1", "true", "yes", "y"}
    return next((name for name in names if os.environ.get(name, "").lower() in yes), "")


def variables(names: Collection[str]) -> dict[str, str]:
    """Return those of an engine's variables that are set, in a fixed order."""
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def variables_like(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the variables that are set and match a pattern, in a fixed order."""
    return {name: os.environ[name] for name in sorted(os.environ) if pattern.fullmatch(name)}


def hub_cache_dir() -> Path:
    """Return where the client of the Hugging Face hub keeps models; it may not exist."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(value).expanduser()
    if value := os.environ.get("HF_HOME"):
        return Path(value).expanduser() / "hub"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else _home() / ".cache") / "huggingface" / "hub"


def configured_runtime_root() -> Path | None:
    """Return BELUGA_RUNTIME_DIR, the directory of all pools' lock files; it may not exist."""
    value = os.environ.get("BELUGA_RUNTIME_DIR")
    return Path(value).absolute() if value else None


def runtime_root() -> Path:
    """Return the directory of lock files without a device file beside them; it may not exist."""
    if (value := configured_runtime_root()) is not None:
        return value
    shared = conventions.RUNTIME_ROOT
    if os.access(shared if shared.exists() else shared.parent, os.W_OK):
        return shared
    of_user = os.environ.get("XDG_RUNTIME_DIR")
    return Path(of_user) / "beluga" if of_user else Path(f"/tmp/beluga-{os.getuid()}")  # noqa: S108


def notify_socket() -> str | None:
    """Return the socket for the readiness notification of a service, as an argument of sendto()."""
    value = os.environ.get("NOTIFY_SOCKET") or None
    return "\0" + value[1:] if value is not None and value.startswith("@") else value


def with_notify_socket(address: str) -> dict[str, str]:
    """Return the environment for a child that notifies ``address`` when it is ready."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("WATCHDOG_")
    }
    return inherited | {"NOTIFY_SOCKET": address}


def watchdog_s() -> float | None:
    """Return the watchdog's timeout for this process in seconds; None without a watchdog."""
    time_us = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # set for a parent process
    return int(time_us) / 1e6 if time_us.isdecimal() and int(time_us) > 0 else None


def start_no_blas_threads() -> None:
    """Set OPENBLAS_NUM_THREADS to 1, unless it is set. Otherwise the import of numpy starts
    a thread for each core, for linear algebra, which no command uses.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def store_variable(name: str) -> str:
    """Return a variable of the clients of object stores; "" if it is not set."""
    return os.environ.get(name, "")
