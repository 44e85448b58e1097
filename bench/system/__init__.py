# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parts of the running system: recovery, index, events, gateway, tiers and link scheduler."""
