# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Events of the pool: the server publishes stored and removed blocks for routers."""

from beluga.events.forms import FORMS, EventSource, form_named
from beluga.events.service import EventService, EventSettings
from beluga.events.table import NameTable

__all__ = ["FORMS", "EventService", "EventSettings", "EventSource", "NameTable", "form_named"]
