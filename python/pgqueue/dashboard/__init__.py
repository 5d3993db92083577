"""A page for whoever is on call: `python -m pgqueue dashboard`, or an ASGI app to mount."""

from pgqueue.dashboard.web import LOOPBACK
from pgqueue.dashboard.web import Dashboard as app

__all__ = ["LOOPBACK", "app"]
