# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Beluga: a shared KV-cache pool for LLM inference."""
