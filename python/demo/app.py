"""The demo's jobs: count lines, functions and classes of one Python source file."""

import ast
import tokenize
import warnings

import pgqueue

app = pgqueue.App()
warnings.simplefilter("ignore")  # old sources have old escapes in their strings


@app.job("count_library", transaction=True)
@app.job("count_test", transaction=True)
def count_source(job: pgqueue.Job, path: str) -> dict[str, int]:
    """Store what a file holds, in the transaction that completes the job."""
    with tokenize.open(path) as file:
        source = file.read()
    nodes = list(ast.walk(ast.parse(source)))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    counts = {
        "lines": source.count("\n"),
        "functions": sum(isinstance(node, functions) for node in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
    }
    job.connection.execute(
        "insert into source_file values (%s, %s, %s, %s)", (path, *counts.values())
    )
    return counts
