# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link scheduler: who of this host may copy next over the link to the pool (``csrc/iosched/``).

All processes of a host share a link. Nothing here copies a byte itself.
"""
