"""What the command lines share: reading arguments, and printing, with control characters escaped."""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import TupleRow

LINES = "\n\t"
LONGEST = 2000  # characters that a line of a traceback, or of a log, may have


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, and whatever else cannot be printed."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def say(text: str) -> None:
    if sys.stderr:  # if it is closed, print() would take stdout
        print(f"pgqueue: {printable(text, keep=LINES)}", file=sys.stderr)


ALLOWS = "pgqueue.grant_access(role, '{}') allows it"


def explain(error: BaseException, role: str | None = None) -> str:
    """Return what went wrong and, if a right is missing, the grant that provides it."""
    text = str(error)
    if isinstance(error, psycopg.Error):
        text = sentences(error.diag) or text
    if role and isinstance(error, psycopg.errors.InsufficientPrivilege):
        if not error.diag.message_hint:  # which would say what allows it
            text += "; " + getattr(error, "__notes__", [ALLOWS.format(role)])[0]
    return text.strip()


def sentences(said: psycopg.errors.Diagnostic) -> str:
    """Join the server's message without its context, which names SQL functions."""
    parts = said.message_primary, said.message_detail, said.message_hint
    return ". ".join(part.rstrip(".") for part in parts if part)


def trace(error: BaseException, most: int = 6000) -> str:
    """Show an error with the end of its traceback, which says most and no long message pushes out."""
    try:
        parts = traceback.TracebackException.from_exception(error).format()
        return "".join(_cut_line(part) for part in parts)[-most:]
    except BaseException as worse:  # by its own code
        return unshown(error, worse)


def unshown(error: BaseException, worse: BaseException) -> str:
    return f"{type(error).__name__}, which raised {type(worse).__name__} when shown"


def _cut_line(line: str) -> str:
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]}… ({len(line)} characters)\n"


def rows(cursor: psycopg.Cursor[TupleRow]) -> list[dict[str, Any]]:
    """Return rows by the names of their columns."""
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def say_json(value: Any) -> None:
    """Print a line of JSON: intervals in seconds, and times as in RFC 3339."""
    print(json.dumps(value, default=_as_json), flush=True)


def _as_json(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else float(value)


def version() -> str:
    try:
        return importlib.metadata.version("pgqueue-postgres")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source"


def refuse_non_utf8(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse bytes that Python reads as lone surrogates: Postgres would, too."""
    values = (v for name, v in os.environ.items() if name.startswith("PGQUEUE_"))
    for text in (*argv, *values):
        if any("\ud800" <= c <= "\udfff" for c in text):
            parser.error(f"not UTF-8: {printable(text)}")


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Make the reader of an argument; it raises argparse.ArgumentTypeError."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (number := int(text)) <= most:
                return number
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")

    return read


def seconds(text: str) -> float:
    """Read an argument: how long to wait. Raises argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) <= 1e9:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


@dataclass
class Column:
    head: str
    values: Sequence[Any]

    def __post_init__(self) -> None:
        self.texts = [_text(value) for value in self.values]
        # Numbers are not cut.
        self.is_number = any(isinstance(v, int | timedelta) for v in self.values)
        longest = max(map(len, self.texts), default=0)
        self.width = max(len(self.head), longest)
        self.least = longest if self.is_number else min(self.width, 8)

    def lines(self) -> list[str]:
        place = ">" if self.is_number else "<"
        shown = [self.head, "-" * self.width, *self.texts]
        return [f"{_cut(text, self.width):{place}{self.width}}" for text in shown]


def show(cursor: psycopg.Cursor[TupleRow]) -> None:
    """Print rows as a table: numbers to the right, text to the left.

    If it is too wide, empty columns are left out, then the longest texts are cut, and then the
    last columns are left out, and named below.
    """
    rows, heads = cursor.fetchall(), [c.name for c in cursor.description or ()]
    columns = [Column(head, [row[i] for row in rows]) for i, head in enumerate(heads)]
    room = shutil.get_terminal_size((80, 24)).columns
    if _width(columns) > room:
        columns = [c for c in columns if any(c.values)] or columns
    while _width(columns) > room and (
        long := [c for c in columns if c.width > c.least]
    ):
        max(long, key=lambda column: column.width).width -= 1
    left_out: list[str] = []
    while _width(columns) > room and len(columns) > 1:
        left_out.insert(0, columns.pop().head)
    for cells in zip(*(column.lines() for column in columns), strict=True):
        print("  ".join(cells).rstrip())
    if left_out:
        print(_cut(f"no room for {', '.join(left_out)}", room))


def show_row(cursor: psycopg.Cursor[TupleRow]) -> None:
    """Print one row in full, each column that is not empty; raise LookupError if there is none."""
    row = cursor.fetchone()
    if row is None:
        raise LookupError("no such job is waiting, running or dead")
    for column, value in zip(cursor.description or (), row, strict=True):
        if value is not None:
            print(f"{column.name}: {printable(str(value), keep=LINES)}")


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 2 for column in columns) - 2


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, timedelta):
        rounded = timedelta(seconds=round(value.total_seconds()))
        return f"-{-rounded}" if rounded < timedelta() else str(rounded)
    return printable(str(value))
