"""Serves the dashboard alone; it may be mounted without uvicorn."""

from collections.abc import Collection

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
) -> None:
    """Say where, and serve the page until a signal; Ctrl-C raises KeyboardInterrupt."""
    own_name = f"[{host}]" if ":" in host else host
    url = f"http://{own_name}:{port}/"
    say_json({"url": url}) if as_json else say(f"the dashboard is at {url}")
    page = app(dsn, allow_actions, hosts=(*LOOPBACK, own_name, *hosts))
    config = uvicorn.Config(page, host, port, log_level="warning", server_header=False)
    uvicorn.Server(config).run()
