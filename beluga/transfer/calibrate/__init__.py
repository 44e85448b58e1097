# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What copying costs on this machine: measured in a scratch pool, kept in the user's cache folder.

The engines below ``engines/`` keep their own measurements with it; ``select/`` decides by it.
"""
