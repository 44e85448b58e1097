# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine (``csrc/cuda/``, ``csrc/transfer/spans.c``): kernels that read and write the
mapped pool.

``CudaEngine(pool)`` needs a GPU and cupy.
"""

from beluga.transfer.cuda.device import CupyDriver, why_no_cupy
from beluga.transfer.cuda.driver import Driver, DriverError
from beluga.transfer.cuda.engine import CudaEngine
from beluga.transfer.cuda.transfer import CapturedTransfer, CudaStat

__all__ = [
    "CapturedTransfer",
    "CudaEngine",
    "CudaStat",
    "CupyDriver",
    "Driver",
    "DriverError",
    "why_no_cupy",
]
