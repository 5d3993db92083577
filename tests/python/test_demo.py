"""make demo, as far as Python does it."""

from documents import REPO
from projects import PACKAGE, Project


def test_the_demo_completes_all_but_the_three_jobs_that_cannot_be(db, tmp_path):
    db.execute("drop extension pgqueue")
    project = Project(tmp_path, PGDATABASE=db.info.dbname, PYTHONPATH=str(PACKAGE))
    said = project.run("-m", "demo").stdout
    work = "select count(*), count(*) filter (where functions > 0) from source_file"
    ((files, with_functions),) = db.execute(work)
    # Counted, because the view estimates from 400 pages on, which busy neighbours can make of these runs.
    done = "select count(*) from pgqueue.run as r where r.queue = q.queue and r.outcome = 'completed'"
    query = f"select q.queue, q.ready, q.dead, ({done}) from pgqueue.queues as q"
    assert {tuple(row) for row in db.execute(query)} == {
        ("quick", 0, 0, 20000),
        ("sources", 0, 3, files),
        ("sums", 0, 0, 1),
    }
    assert f"{files + 3} real jobs" in said
    assert with_functions > files / 2
    assert "its result: {'lines': " in said
    titles = "that do nothing", "The queues", "The kinds", "The dead letters"
    assert all(title in said for title in titles)


def test_the_page_shows_what_the_demo_prints():
    shown = (REPO / "docs/demo.md").read_text().partition("<!-- demo")[2]
    source = (REPO / "python/demo/__main__.py").read_text()
    for line in shown.splitlines():
        if line.startswith("The "):
            assert f'"{line}"' in source
