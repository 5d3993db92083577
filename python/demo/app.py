"""The demo's handlers: one that does nothing, and one that reads Python source files."""

import ast
import time
import tokenize
import warnings
from pathlib import Path

import pgqueue

app = pgqueue.App()
warnings.simplefilter("ignore")  # old sources have old escapes in their strings


@app.job("ping", queue="quick")
def ping() -> None:
    """Do nothing: all the time it takes is the queue's own work."""


def count_source(job: pgqueue.Job, path: str) -> None:
    """Store what a file holds, in the transaction that completes the job."""
    with tokenize.open(path) as file:
        source = file.read()
    nodes = list(ast.walk(ast.parse(source)))
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes
    )
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    job.connection.execute(
        "insert into source_file values (%s, %s, %s, %s)",
        (path, source.count("\n"), functions, classes),
    )


@app.job("sum_lines", queue="sums")
def sum_lines(job: pgqueue.Job, paths: list[str]) -> dict[str, int]:
    """Report progress while reading, for those who watch or wait."""
    lines = 0
    for done, path in enumerate(paths):
        job.progress(done, len(paths), Path(path).name)
        with open(path, "rb") as file:
            lines += sum(1 for _ in file)
        time.sleep(0.004)  # or nobody would see it
    return {"lines": lines}


for kind in "count_library", "count_test":
    register = app.job(
        kind, queue="sources", transaction=True, give_up_on=(SyntaxError,)
    )
    register(count_source)
