"""A page for whoever is on call: `python -m pgqueue dashboard`, or an ASGI app to mount."""

from pgqueue.dashboard.web import LOOPBACK, app

__all__ = ["LOOPBACK", "app"]
