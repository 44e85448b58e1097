# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The link scheduler: it decides which copy of this host may use the link to a pool next
(``csrc/iosched/``).

All processes of a host share a link. Nothing here copies a byte itself.
"""
