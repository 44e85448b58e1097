# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whom the gateway's listeners answer: the checks of every request before its handler."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from beluga.errors import RouterError
from beluga.gateway.answers import Refusal
from beluga.gateway.settings import Address, Settings
from beluga.listening import KnownHosts, Token, from_other_site, is_loopback

_READS = ("GET", "HEAD", "OPTIONS")
_HEALTH = ("/health", "/ready")
# What a browser sends to another site without asking that site first (a "simple" request).
_FORMS = ("text/plain", "application/x-www-form-urlencoded")
_SIMPLE = (*_FORMS, "multipart/form-data", "")
_NOT_OURS = (
    "this router does not answer to the name %s; use its address, or allow the name by --allow-host"
)


def of_clients(settings: Settings) -> Middleware:
    """Return the check of the clients' listener. Where only this machine can connect, the Host must
    be one of its names, and elsewhere one of the allowed names if there are any. Health is for any
    name. A page of another site may send only what its browser asks about first, since engines'
    CORS settings answer that.
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
            f"the admin address {address.host}:{address.port} can be reached by other machines; "
            "give --admin-token FILE, or listen on 127.0.0.1"
        )
    hosts = KnownHosts(address.host, settings.callers.hosts)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request, hosts)
        if request.method not in _READS:
            if from_other_site(request.headers):
                raise Refusal(403, "a page of another site may change nothing here")
            if request.body_exists and request.content_type != "application/json":
                raise Refusal(415, "bodies are JSON here; say Content-Type: application/json")
        if token is not None:
            _check_token(request, token)
        return await handler(request)

    return check


def _check_host(request: web.Request, hosts: KnownHosts) -> None:
    """Raise Refusal unless a request has one Host at most, a known one. Browsers always send it."""
    named = request.headers.getall(hdrs.HOST, [])
    if len(named) > 1:
        raise Refusal(400, "a request has one Host")
    if named and named[0] not in hosts:
        raise Refusal(421, _NOT_OURS % repr(named[0][:80]))


def _check_token(request: web.Request, token: Token) -> None:
    if not token.shown_by(request.headers.get(hdrs.AUTHORIZATION, "")):
        raise Refusal(401, "this needs the token of --admin-token: Authorization: Bearer TOKEN")


def _check_kind(request: web.Request, origins: tuple[str, ...]) -> None:
    """Raise Refusal for a body that no engine takes, and for one that another site's page may have
    sent without asking. Audio comes as a form from pages, too, with their key.
    """
    if not request.body_exists:
        return
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind in _FORMS:
        raise Refusal(415, f"no engine takes {kind}; say Content-Type: application/json")
    asked_first = kind not in _SIMPLE or hdrs.AUTHORIZATION in request.headers
    if not asked_first and from_other_site(request.headers, origins):
        raise Refusal(
            403, "a page of another site sends JSON or its key here, or is allowed (--allow-origin)"
        )
