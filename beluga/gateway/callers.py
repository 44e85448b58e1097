# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Access control of the gateway's listeners: the checks before each request's handler."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from beluga.errors import RouterError
from beluga.gateway.answers import Refusal
from beluga.gateway.settings import Address, Settings
from beluga.listening import KnownHosts, Token, from_other_site, is_loopback

_READS = ("GET", "HEAD", "OPTIONS")
_HEALTH = ("/health", "/ready")
# Content types that a browser sends to another site without a preflight (a "simple" request).
_FORMS = ("text/plain", "application/x-www-form-urlencoded")
_SIMPLE = (*_FORMS, "multipart/form-data", "")
_NOT_OURS = (
    "this router does not accept the host name %s; use its address, or allow the name with "
    "--allow-host"
)


def of_clients(settings: Settings) -> Middleware:
    """Return the check of the clients' listener. If only this machine can connect, the Host must be
    one of its names, otherwise one of the allowed names if there are any. Health checks accept any
    name. A page of another site may only send requests for which its browser makes a preflight,
    because engines' CORS settings decide about those.
    """
    listening, allowed = settings.listen.host, settings.callers.hosts
    checked = is_loopback(listening) or bool(allowed)
    hosts = KnownHosts(listening, allowed, single_labels=True) if checked else None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hosts is not None and request.path not in _HEALTH:
            _check_host(request, hosts)
        if request.method not in _READS:
            _check_kind(request, settings.callers.origins)
        return await handler(request)

    return check


def of_operators(settings: Settings, address: Address) -> Middleware:
    """Return the check of the operators' listener: a Host that is this machine's, no page of
    another site, JSON, and the token if there is one. Raises RouterError if other machines can
    connect, and need no token.
    """
    token = settings.callers.admin_token
    if token is None and not is_loopback(address.host):
        raise RouterError(
            f"the admin address {address.host}:{address.port} is reachable from other machines; "
            "give --admin-token FILE, or listen on 127.0.0.1"
        )
    hosts = KnownHosts(address.host, settings.callers.hosts)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request, hosts)
        if request.method not in _READS:
            if from_other_site(request.headers):
                raise Refusal(403, "a page of another site must not change anything here")
            if request.body_exists and request.content_type != "application/json":
                raise Refusal(415, "the body must be JSON; send Content-Type: application/json")
        if token is not None:
            _check_token(request, token)
        return await handler(request)

    return check


def _check_host(request: web.Request, hosts: KnownHosts) -> None:
    """Raise Refusal unless a request has at most one Host, an accepted one. Browsers always send
    it. The same holds for the host of a whole URL as the target, which replaces the header's.
    """
    named = request.headers.getall(hdrs.HOST, [])
    if len(named) > 1:
        raise Refusal(400, "a request must have one Host header")
    if not request.raw_path.startswith("/"):
        named = [*named, request.url.raw_authority]
    for name in named:
        if name not in hosts:
            raise Refusal(421, _NOT_OURS % repr(name[:80]))


def _check_token(request: web.Request, token: Token) -> None:
    if not token.shown_by(request.headers.get(hdrs.AUTHORIZATION, "")):
        raise Refusal(
            401, ("this needs the token of --admin-token; send Authorization: Bearer TOKEN")
        )


def _check_kind(request: web.Request, origins: tuple[str, ...]) -> None:
    """Raise Refusal for a content type that no engine accepts, and for one that another site's page
    can send without a preflight. Audio is a form even from legitimate pages, which then send their
    API key.
    """
    if not request.body_exists and request.method != hdrs.METH_POST:
        return  # browsers make a preflight for these methods
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind in _FORMS and request.body_exists:
        raise Refusal(415, f"no engine accepts {kind}; send Content-Type: application/json")
    has_preflight = kind not in _SIMPLE or hdrs.AUTHORIZATION in request.headers
    if not has_preflight and from_other_site(request.headers, origins):
        raise Refusal(
            403,
            (
                "a page of another site must send JSON or its API key, or be allowed "
                "(--allow-origin)"
            ),
        )
