"""Serves the dashboard alone; it may be mounted without uvicorn."""

import ipaddress
import os
import secrets
from argparse import Namespace
from collections.abc import Callable
from socket import socket
from urllib.parse import quote

import uvicorn

from pgqueue.dashboard import LOOPBACK, app
from pgqueue.terminal import say, say_json


def serve(dsn: str, args: Namespace) -> int:
    """Say where, and serve the page until a signal; Ctrl-C raises KeyboardInterrupt.

    The arguments are those of the command `dashboard`.
    """
    host, has_secret = args.host, not args.no_secret
    if args.allow_actions and not has_secret and not is_loopback(host):
        say(
            f"refused: anybody who reaches {host or 'this machine'} could act. Leave out --no-secret, or"
            " --allow-actions, or listen on 127.0.0.1 with a proxy in front that authenticates users."
        )
        return 2
    # Any user of this machine can reach its ports.
    secret = os.environ.get("PGQUEUE_DASHBOARD_SECRET") or secrets.token_urlsafe(18)
    own_name = f"[{host}]" if ":" in host else host
    url = f"http://{own_name}:{args.port}/"
    shown = f"{url}?secret={quote(secret, safe='')}" if has_secret else url

    def say_where() -> None:
        if args.json:
            say_json({"url": shown})
        else:
            say(f"the dashboard is at {shown}")

    hosts = (*LOOPBACK, own_name, *args.allow_host)
    known = secret if has_secret else None
    page = app(dsn, args.allow_actions, hosts=hosts, secret=known)
    config = uvicorn.Config(
        page, host, args.port, log_level="warning", server_header=False
    )
    try:
        Server(config, say_where).run()
    except SystemExit:  # it cannot listen there, and has said why
        return 1
    return 0


class Server(uvicorn.Server):
    """Says where it is as soon as it is there."""

    def __init__(self, config: uvicorn.Config, say_where: Callable[[], None]) -> None:
        super().__init__(config)
        self.say_where = say_where

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.say_where()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
