# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Events of the pool: the server publishes stored and removed blocks for routers."""

from beluga.events.forms import form_named
from beluga.events.service import EventService, EventSettings

__all__ = ["EventService", "EventSettings", "form_named"]
