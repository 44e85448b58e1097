# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin endpoint of a server: small HTTP routes, over a socket of the pool's runtime directory
and optionally over TCP (``beluga serve --admin``).

It runs in the server's process, on threads of its own. Users with access to the runtime directory
may use the socket; over TCP nothing can be changed.
"""

from beluga.admin.local_socket import request, request_any, request_json
from beluga.admin.routes import (
    AdminRequest,
    AdminResponse,
    Route,
    Routes,
    ServerHealth,
    json_response,
    lane_routes,
    page_routes,
    server_routes,
)
from beluga.admin.server import Admin, read_address

__all__ = [
    "Admin",
    "AdminRequest",
    "AdminResponse",
    "Route",
    "Routes",
    "ServerHealth",
    "json_response",
    "lane_routes",
    "page_routes",
    "read_address",
    "request",
    "request_any",
    "request_json",
    "server_routes",
]
