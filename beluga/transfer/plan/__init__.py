# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans: which bytes of an engine's memory are which bytes of the pool.

``layout`` and ``arrangements`` describe an inference engine's tensors, ``view`` its memory;
``plan`` makes the list of pieces that every copy engine executes, cut by ``cuts`` and ``finer``.
"""
