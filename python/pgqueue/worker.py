"""python -m pgqueue.worker --app MODULE[:NAME]: run the jobs of some queues."""

import argparse
import importlib
import logging
import os
import signal
import sys

from pgqueue.app import App
from pgqueue.database import INCOMPATIBLE
from pgqueue.loop import Worker


def load(path: str) -> App:
    """Import an app by MODULE or MODULE:NAME; the name defaults to app."""
    sys.path.insert(0, os.getcwd())
    module, _, name = path.partition(":")
    app = getattr(importlib.import_module(module), name or "app")
    if not isinstance(app, App):
        raise TypeError(f"{path} is no pgqueue.App")
    return app


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pgqueue.worker")
    parser.add_argument("--app", required=True)
    parser.add_argument("--queue", action="append")
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--dsn")
    parser.add_argument("--lease", type=float)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    worker = Worker(
        load(args.app),
        dict.fromkeys(args.queue or ["default"], 1),
        dsn=args.dsn,
        concurrency=args.concurrency,
        lease=args.lease,
        burst=args.burst,
    )
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda *_: worker.stop())
    try:
        worker.run()
    except INCOMPATIBLE as error:
        print(f"pgqueue: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
