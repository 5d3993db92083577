"""The SQL of the pages below docs/, page by page: run as written, each in a database of its own."""

import documents
import pytest
import recipes
from conftest import column, one
from documents import PAGES, REPO

# What is not run here: for each page and language, the file of tests that runs it.
ELSEWHERE = {
    ("docs/moving.md", "sql"): "test_move_in.py",
    ("docs/moving.md", "python"): "test_move_in.py",
    ("docs/moving.md", "sh"): "test_move_in.py",
    ("docs/celery.md", "python"): "test_recipes.py",
    ("docs/demo.md", "text"): "test_demo.py",
    ("docs/dependencies.md", "python"): "test_recipes.py",
    ("docs/jobs.md", "text"): "test_readme.py",
    ("docs/playbook.md", "sh"): "test_readme.py",
    ("docs/python.md", "python"): "test_readme.py",
    ("docs/python.md", "sh"): "test_readme.py",
    ("docs/dashboard.md", "python"): "test_dashboard.py",
    ("docs/dashboard.md", "sh"): "test_dashboard.py",
    ("docs/django.md", "python"): "test_django.py",
    ("docs/django.md", "sh"): "test_django.py",
    ("docs/fastapi.md", "python"): "test_recipes.py",
    ("docs/operating.md", "sh"): "test_recipes.py",
    ("docs/reference/python.md", "python"): "test_recipes.py",
    ("docs/reference/worker.md", "ini"): "test_run_time_tables.py",
    ("docs/schedules.md", "python"): "test_recipes.py",
    ("docs/shards.md", "python"): "test_shards.py",
    ("docs/shards.md", "sh"): "test_shards.py",
    ("docs/shards.md", "router"): "test_router.py",
    ("docs/shards.md", "text"): "test_scale_demo.py",
    ("docs/testing.md", "python"): "test_recipes.py",
    ("docs/steps.md", "python"): "test_orders.py",
    ("docs/tutorial.md", "python"): "test_tutorial.py",
    ("docs/tutorial.md", "sh"): "test_tutorial.py",
    ("docs/tutorial.md", "sql"): "test_tutorial.py",
    ("docs/tracing.md", "python"): "test_recipes.py",
    ("docs/tracing.md", "sql"): "test_recipes.py",
    ("docs/upgrading.md", "sh"): "test_upgrade.py",
    ("docs/upgrading.md", "sql"): "test_upgrade.py",
    ("docs/own-worker.md", "js"): "test_own_workers.py",
    ("docs/own-worker.md", "python"): "test_own_workers.py",
    ("docs/own-worker.md", "psql"): "test_own_workers.py",
    ("docs/own-worker.md", "sh"): "test_own_workers.py",
}
# What a page speaks of as if it were there.
GIVEN = {
    "docs/playbook.md": "select pgqueue.pause('emails')",
    "docs/operating.md": "select pgqueue.enqueue(q) from unnest(array['a', 'b', 'c']) as q",
    "docs/dashboard.md": "select pgqueue.complete(id, token) from pgqueue.enqueue('q') as q, pgqueue.claim('q', 'w')",
}
# What is true when its examples have run.
THEN = {
    "docs/reference/access.md": "select has_function_privilege('shop', 'pgqueue.enqueue'::regproc, 'execute')",
}
ROLES = ("shop", "partner")


def languages(page: str) -> set[str]:
    return {block.language for block in documents.blocks(documents.text(page))}


HERE = [
    page
    for page in PAGES
    if "sql" in languages(page) and (page, "sql") not in ELSEWHERE
]


@pytest.mark.parametrize("page", HERE)
def test_the_examples_run_in_order_and_say_what_the_page_shows(db, page):
    if page in GIVEN:
        db.execute(GIVEN[page])
    try:
        for block in documents.blocks(documents.text(page), "sql"):
            documents.run_sql(block, db.info.dbname)
        assert page not in THEN or one(db, THEN[page])
    finally:
        for role in column(
            db, "select rolname from pg_roles where rolname = any (%s)", [*ROLES]
        ):
            db.execute(f"drop owned by {role}; drop role {role}")


def test_every_block_of_every_page_is_run_here_or_by_the_file_named_above():
    found = {(page, language) for page in PAGES for language in languages(page)}
    assert {key for key in found if key[1] != "sql"} <= set(ELSEWHERE)
    assert set(ELSEWHERE) <= found
    for (page, _), name in ELSEWHERE.items():
        test = (REPO / "tests/python" / name).read_text()
        reads = page in (recipes.PAGES if "from recipes import" in test else test)
        assert reads, f"{name} does not read {page}"
