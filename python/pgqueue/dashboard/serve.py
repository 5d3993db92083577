"""Serves the dashboard alone; it may be mounted without uvicorn."""

from collections.abc import Collection

import uvicorn

from pgqueue.dashboard.web import LOOPBACK, app


def serve(
    dsn: str | None,
    host: str,
    port: int,
    allow_actions: bool,
    hosts: Collection[str] = (),
) -> None:
    """Serve the page until a signal; Ctrl-C raises KeyboardInterrupt."""
    own_name = f"[{host}]" if ":" in host else host
    page = app(dsn, allow_actions, hosts=(*LOOPBACK, own_name, *hosts))
    config = uvicorn.Config(page, host, port, log_level="warning", server_header=False)
    uvicorn.Server(config).run()
