# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine (``csrc/cuda/``, ``csrc/transfer/spans.c``): kernels that read and write the
mapped pool.

``CudaEngine(pool)`` needs a GPU and cupy; ``CudaEngine(pool, driver=HostDriver())`` runs the same
kernels, compiled for this CPU.
"""

from beluga.transfer.engines.cuda.capture import CapturedTransfer
from beluga.transfer.engines.cuda.device import CupyDriver, why_no_cupy
from beluga.transfer.engines.cuda.driver import Driver, DriverError
from beluga.transfer.engines.cuda.engine import CudaEngine
from beluga.transfer.engines.cuda.host import HostDriver
from beluga.transfer.engines.cuda.paths import CudaStat

__all__ = [
    "CapturedTransfer",
    "CudaEngine",
    "CudaStat",
    "CupyDriver",
    "Driver",
    "DriverError",
    "HostDriver",
    "why_no_cupy",
]
