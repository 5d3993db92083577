"""Serves the dashboard alone; it may be mounted without uvicorn."""

import ipaddress
import os
import secrets
from collections.abc import Collection
from urllib.parse import quote

import uvicorn

from pgqueue.dashboard.web import LOOPBACK, app
from pgqueue.terminal import say, say_json


def serve(
    dsn: str | None,
    host: str,
    port: int,
    allow_actions: bool,
    hosts: Collection[str] = (),
    as_json: bool = False,
    has_secret: bool = True,
) -> int:
    """Say where, and serve the page until a signal; Ctrl-C raises KeyboardInterrupt."""
    if allow_actions and not has_secret and not is_loopback(host):
        say(
            f"refused: anybody who reaches {host or 'this machine'} could act. Leave out --no-secret, or"
            " --allow-actions, or listen on 127.0.0.1 with a proxy in front that asks who it is."
        )
        return 2
    # Any user of this machine can reach its ports.
    secret = os.environ.get("PGQUEUE_DASHBOARD_SECRET") or secrets.token_urlsafe(18)
    own_name = f"[{host}]" if ":" in host else host
    url = f"http://{own_name}:{port}/"
    shown = f"{url}?secret={quote(secret, safe='')}" if has_secret else url
    say_json({"url": shown}) if as_json else say(f"the dashboard is at {shown}")
    page = app(
        dsn,
        allow_actions,
        hosts=(*LOOPBACK, own_name, *hosts),
        secret=secret if has_secret else None,
    )
    config = uvicorn.Config(page, host, port, log_level="warning", server_header=False)
    uvicorn.Server(config).run()
    return 0


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
