# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin endpoint of a server: small HTTP routes, over a socket of the pool's runtime directory
and optionally over TCP (``beluga serve --admin``).

It runs in the server's process, on its own threads. Users with access to the runtime directory may
use the socket; over TCP nothing can be changed.
"""

from beluga.admin.address import read_address
from beluga.admin.client import ask, ask_json, ask_someone, standing_by
from beluga.admin.endpoint import Admin
from beluga.admin.health import ServerHealth
from beluga.admin.page import page_routes
from beluga.admin.route import AdminRequest, Answer, Route, Routes, json_answer
from beluga.admin.routes import server_routes

__all__ = [
    "Admin",
    "AdminRequest",
    "Answer",
    "Route",
    "Routes",
    "ServerHealth",
    "ask",
    "ask_json",
    "ask_someone",
    "json_answer",
    "page_routes",
    "read_address",
    "server_routes",
    "standing_by",
]
