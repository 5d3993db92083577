"""What others can see of a worker, besides its log: the health file, systemd's watchdog."""

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Callable, Sequence

from pgqueue.terminal import printable
from pgqueue.worker.seldom import log

SYSTEMD = os.environ.get("NOTIFY_SOCKET")  # now: a handler may change the environment


class Health:
    """Shows once that the worker is ready, and each second that no part of it has died."""

    def __init__(
        self,
        file: str | None,
        on_ready: Callable[[], None],
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = pathlib.Path(file) if file else None
        self._on_ready = on_ready
        self._on_alive = on_alive
        self._next_at = 0.0
        self._is_ready = False
        self._has_complained = False

    def __call__(self, is_ready: bool, states: Sequence[str] = ()) -> None:
        state = "WATCHDOG=1"
        if is_ready and not self._is_ready:
            self._is_ready = True
            self._on_ready()
            state = f"READY=1\n{state}"
        elif time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + 1
        if self._file:
            self._touch(self._file, states)
        notify_systemd(state)
        self._on_alive()

    def _touch(self, file: pathlib.Path, states: Sequence[str]) -> None:
        try:
            if states:
                text = "".join(f"{printable(state)}\n" for state in states)
                # Whatever locale a handler has set.
                file.write_text(text, encoding="utf-8", errors="replace")
            else:
                file.touch()
            self._has_complained = False
        except OSError as error:
            if not self._has_complained:
                log.warning("cannot touch the health file: %s", error)
            self._has_complained = True


def notify_systemd(state: str) -> None:
    """Tell systemd (Type=notify); with --processes it needs NotifyAccess=all."""
    if address := SYSTEMD:
        address = "\0" + address[1:] if address.startswith("@") else address
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix:
                unix.sendto(state.encode(), address)
