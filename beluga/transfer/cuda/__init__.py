# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine: kernels that read and write the mapped pool, or stage in GPU memory."""
