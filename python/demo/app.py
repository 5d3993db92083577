"""The demo's job: count lines, functions and classes of one Python source file."""

import ast
from pathlib import Path

import pgqueue

app = pgqueue.App()


@app.job("count_source", transaction=True)
def count_source(job: pgqueue.Job, path: str) -> dict[str, int]:
    """Store what a file holds, in the transaction that completes the job."""
    source = Path(path).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    counts = {
        "lines": source.count("\n"),
        "functions": sum(
            isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in nodes
        ),
        "classes": sum(isinstance(n, ast.ClassDef) for n in nodes),
    }
    job.connection.execute(
        "insert into source_file values (%s, %s, %s, %s)", (path, *counts.values())
    )
    return counts
