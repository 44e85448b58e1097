# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine (``csrc/cuda/``): kernels that read and write the mapped pool.

``CudaEngine(pool)`` needs a GPU, NVIDIA's driver and NVRTC.
"""

from beluga.transfer.cuda.device import CudaDevice, DriverError, why_no_cuda
from beluga.transfer.cuda.engine import CapturedTransfer, CudaEngine, CudaStat, CudaTransfer

__all__ = [
    "CapturedTransfer",
    "CudaDevice",
    "CudaEngine",
    "CudaStat",
    "CudaTransfer",
    "DriverError",
    "why_no_cuda",
]
