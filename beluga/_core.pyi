# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What cffi builds from csrc/api/: its prototypes are the types, checked when it is compiled."""

from typing import Any

ffi: Any
lib: Any
