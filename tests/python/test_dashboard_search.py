"""The search of the dashboard: what it finds, page by page, and that no page reads much, whatever is there."""

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from itertools import combinations
from urllib.parse import quote, urlencode

import documents
import psycopg
import pytest
from conftest import column, database, one
from dashboard_site import Site, kill
from pgqueue.dashboard import pages, search
from pgqueue.dashboard.pages import Page, Reading, read
from test_dashboard import Found, press, said, send

pytest_plugins = ["dashboard_site"]

OWN_PAGE = documents.sections("docs/dashboard.md")["A page of your own"]


def ids(text: str) -> list[int]:
    """List the jobs of a page, in its order."""
    return [
        int(id) for id in re.findall(r'<td class="n"><a href="/job\?id=(\d+)', text)
    ]


def all_pages(site: Site, **asked: str) -> list[list[int]]:
    """Follow the links to the next page till the last."""
    path, pages = f"/jobs?{urlencode(asked)}", []
    while path:
        text = site.get(path).text
        pages.append(ids(text))
        link = re.search(r'<a href="(/jobs\?[^"]*)" rel="next"', text)
        path = link and unescape(link[1])
    return pages


@pytest.fixture(scope="module")
def mixed(template) -> Iterator[tuple[str, dict[str, int]]]:
    """Make a database with jobs that differ in one thing each."""
    with database(template) as dsn:
        with psycopg.connect(dsn, autocommit=True) as db:
            jobs = differing(db)
        yield dsn, jobs


def differing(db: psycopg.Connection) -> dict[str, int]:
    db.execute("select pgqueue.configure(null, keep_payloads => true)")

    def add(**given: object) -> int:
        arguments = ", ".join(f"{name} => %({name})s" for name in given)
        return one(db, f"select pgqueue.enqueue({arguments})", given)

    def claim(queue: str, worker: str) -> tuple[int, int]:
        query = "select id, token from pgqueue.claim(%s, %s)"
        return db.execute(query, (queue, worker)).fetchone()

    batch = one(db, "select pgqueue.create_batch('b')")
    jobs = {
        "plain": add(queue="q", payload=json.dumps({"to": "ada", "n": [1, 2]})),
        "kind": add(queue="q", kind="other", payload='{"to": "bob"}'),
        "group": add(queue="q", group_key="acme"),
        "key": add(queue="q", unique_key="k1"),
        "batch": add(queue="q", batch_id=batch),
        "later": add(queue="q", run_at="2100-01-01"),
        "elsewhere": add(queue="r"),
        "batch id": batch,
    }
    jobs["waits"] = one(
        db, "select pgqueue.enqueue('q', after => array[%s::bigint])", jobs["later"]
    )
    for name in "fails", "dies", "ends", "is cancelled", "runs":
        jobs[name] = add(queue="s", kind=name, payload=json.dumps({"of": name}))
        if name == "is cancelled":
            db.execute("select pgqueue.cancel(%s)", (jobs[name],))
            continue
        _, token = claim("s", f"worker of {name}")
        if name == "ends":
            db.execute("select pgqueue.complete(%s, %s)", (jobs[name], token))
        elif name != "runs":
            query = "select pgqueue.fail(%s, %s, %s, '1 h', %s)"
            error = f"It {name} 7 times\nbecause"
            db.execute(query, (jobs[name], token, error, name == "dies"))
    return jobs


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"queue": "r"}, ["elsewhere"]),
        ({"kind": "other"}, ["kind"]),
        ({"queue": "q", "group": "acme"}, ["group"]),
        ({"group": "acme"}, ["group"]),
        ({"key": "k1"}, ["key"]),
        ({"queue": "q", "key": "k1"}, ["key"]),
        ({"queue": "r", "key": "k1"}, []),
        ({"batch": "batch id"}, ["batch"]),
        ({"payload": '{"to": "ada"}'}, ["plain"]),
        ({"payload": '{"n": [2]}', "queue": "q"}, ["plain"]),
        ({"worker": "worker of runs"}, ["runs"]),
        ({"worker": "worker of dies"}, []),
        ({"error": "it fails %"}, ["fails"]),
        ({"state": "scheduled"}, ["fails", "later"]),
        ({"state": "blocked"}, ["waits"]),
        ({"state": "running"}, ["runs"]),
        ({"state": "expired"}, []),
        ({"state": "ready", "queue": "r"}, ["elsewhere"]),
        ({"state": "dead"}, ["dies"]),
        ({"state": "dead", "queue": "s"}, ["dies"]),
        ({"state": "dead", "queue": "s", "kind": "dies"}, ["dies"]),
        ({"state": "dead", "error": "It dies %"}, ["dies"]),
        ({"state": "dead", "error": "because"}, []),
        ({"state": "dead", "worker": "worker of dies"}, ["dies"]),
        ({"state": "dead", "payload": '{"of": "ends"}'}, []),
        ({"state": "completed"}, ["ends"]),
        ({"state": "completed", "payload": '{"of": "ends"}'}, ["ends"]),
        ({"state": "completed", "payload": '{"of": "dies"}'}, []),
        ({"state": "cancelled"}, ["is cancelled"]),
        ({"state": "failed attempts"}, ["dies", "fails"]),
        ({"state": "failed attempts", "error": "It dies%"}, ["dies"]),
    ],
    ids=str,
)
def test_a_job_is_found_by_what_is_known_of_it(serve, mixed, asked, found) -> None:
    dsn, jobs = mixed
    if "batch" in asked:
        asked = {"batch": str(jobs["batch id"])}
    (shown,) = all_pages(serve(dsn), **asked)
    assert sorted(shown) == sorted(jobs[name] for name in found)


# Jobs that have failed once, each with all that one may ask for.
ENQUEUE = """
select pgqueue.enqueue(
    %(queue)s, %(payload)s, %(kind)s, group_key => %(group)s, unique_key => %(key)s,
    batch_id => %(batch)s
)
"""
CLAIM = "select id, token from pgqueue.claim(%(queue)s, %(worker)s)"
FAIL = "select pgqueue.fail(%s, %s, %s, '0 s', %s)"


def alike(db: psycopg.Connection, is_dead: bool) -> list[tuple[int, dict[str, str]]]:
    """Make a job, and one that differs from it in each field; return the fields of all."""
    values = {name: (f"{name} 1", f"{name} 2") for name in search.FIELDS}
    batches = column(db, "select pgqueue.create_batch('b') from generate_series(1, 2)")
    values |= {"payload": ('{"n": 1}', '{"n": 2}'), "batch": tuple(map(str, batches))}
    jobs = []
    for other in ("", *search.FIELDS):
        fields = {name: two[name == other] for name, two in values.items()}
        # In a queue, only one job that has not ended may have the key.
        if other not in ("", "queue", "key"):
            fields["key"] = f"key of another {other}"
        job = one(db, ENQUEUE, fields)
        _, token = db.execute(CLAIM, fields).fetchone()
        db.execute(FAIL, (job, token, fields["error"], is_dead))
        if not is_dead:
            assert db.execute(CLAIM, fields).fetchone()[0] == job
        jobs.append((job, fields))
    return jobs


OF_A_RUN = ("queue", "kind", "worker", "error")  # of a failed one: the job has the rest


@pytest.mark.parametrize(
    ("state", "fields"),
    [("", search.FIELDS), ("dead", search.FIELDS), ("failed attempts", OF_A_RUN)],
)
def test_whatever_is_asked_together_is_all_applied(db, dsn, state, fields) -> None:
    """Any two or three fields of the first job, and these with one of another."""
    jobs = alike(db, is_dead=state != "")
    (_, first), *others = jobs
    of_other = dict(zip(search.FIELDS, (other for _, other in others), strict=True))
    for names in (*combinations(fields, 2), *combinations(fields, 3)):
        given = {name: first[name] for name in names}
        for asked in (given, *({**given, n: of_other[n][n]} for n in names)):
            page = read(dsn, search.page, {"state": state, **asked})
            found = sorted(row["id"] for row in page.context["jobs"])
            matching = [job for job, has in jobs if asked.items() <= has.items()]
            assert found == matching, asked


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"queue": "q"},
        {"queue": "q", "group": "g"},
        {"state": "scheduled", "queue": "q"},
        {"batch": "1"},
        {"state": "dead"},
        {"state": "dead", "queue": "q"},
        {"state": "dead", "queue": "q", "kind": "q"},
        {"state": "completed"},
    ],
    ids=str,
)
def test_every_job_is_on_one_page(site, db, asked) -> None:
    batch = one(db, "select pgqueue.create_batch('b')")
    # Many of one moment, and with priorities.
    db.execute(
        "select pgqueue.enqueue('q', batch_id => %s, priority => n %% 3, group_key => %s,"
        " run_at => case when %s then now() + interval '1 h' end)"
        " from generate_series(1, 130) as n",
        (batch, asked.get("group"), asked.get("state") == "scheduled"),
    )
    if asked.get("state") == "dead":
        kill(db, "q", "boom")
        db.execute("update pgqueue.dead_job set died_at = now() where id % 2 = 0")
    if asked.get("state") == "completed":
        db.execute(
            "select pgqueue.complete_many(array_agg(id), array_agg(token))"
            " from pgqueue.claim('q', 'w', 130)"
        )
    if "batch" in asked:
        asked = {"batch": str(batch)}
    pages = all_pages(site(), **asked)
    assert [len(page) for page in pages] == [50, 50, 30]
    assert len({id for page in pages for id in page}) == 130


@pytest.mark.parametrize("asked", [{}, {"queue": "q"}, {"state": "dead"}], ids=str)
def test_a_search_that_stops_early_says_so_and_can_go_on(
    site, db, monkeypatch, asked
) -> None:
    monkeypatch.setattr(search, "LOOKED", 100)
    db.execute(
        "select pgqueue.enqueue('q', to_jsonb(n)) from generate_series(1, 250) n"
    )
    if asked:
        kill(db, "q", "boom") if "state" in asked else None
    pages = all_pages(site(), payload="40", **asked)
    assert [len(page) for page in pages].count(1) == 1 and len(pages) == 3
    text = site().get(f"/jobs?{urlencode({**asked, 'kind': 'none'})}").text
    assert "Looked at 100 jobs" in text and "among those looked at" in text


@pytest.mark.parametrize("ago", ["1 second", "50 minutes", "9 days"])
@pytest.mark.parametrize("lasted", ["20 ms", "1 minute"])
def test_the_first_page_of_what_has_ended_shows_the_last_of_a_burst(
    site, db, ago, lasted
) -> None:
    """Of a burst of more runs than a page looks at; the first page used to be empty."""
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select floor(date_part('epoch', f.at) / 86400)::int %% 16, 1, n, f.at, '1 s', '1 s', 'q', 'k', 'completed', 'w'"
        " from generate_series(1, 6000) as n"
        " cross join lateral (select now() - %(ago)s::interval - n / 6000.0 * %(lasted)s::interval) as f (at)",
        {"ago": ago, "lasted": lasted},
    )
    page = site().get("/jobs?state=completed")
    assert ids(page.text) == list(range(1, 51))
    following = re.search(r'<a href="(/jobs\?[^"]*)" rel="next"', page.text)[1]
    assert ids(site().get(unescape(following)).text) == list(range(51, 101))


def test_what_cannot_be_searched_for_is_said(site) -> None:
    page = site()
    for query, status, says in (
        ("payload=%7B", 200, "has to be JSON"),
        ("payload=" + "[" * 9000, 200, "has to be JSON"),
        ("batch=x", 200, "whole number"),
        ("batch=" + "9" * 99, 200, "whole number"),
        ("state=completed&key=k", 200, "neither its unique key nor its batch"),
        ("state=cancelled&batch=7", 200, "neither its unique key nor its batch"),
        ("state=some", 404, "No job has the state"),
        ("from=x", 404, "no such page"),
        ("from=[1,2]", 404, "no such page"),
        ("from=[%22x%22]", 400, ""),
        ("from=[%22%5Cud800%22]", 404, "no such page"),
        ("state=completed&from=[%22x%22,1]", 404, "no such page"),
        ("state=completed&from=[%220001-01-01%2000:00%2B00%22,1]", 404, "no such page"),
        ("queue=%00", 400, ""),
    ):
        answer = page.get(f"/jobs?{query}")
        assert (answer.status, says in unescape(answer.text)) == (status, True), query


def test_a_reader_is_told_that_searching_is_for_operators(site, db, role) -> None:
    db.execute("select pgqueue.enqueue('q', '\"secret\"')")
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    answer = site(user=role).get("/jobs?payload=%22secret%22")
    assert answer.status == 200 and "for operators" in answer.text
    assert ids(answer.text) == []


def test_a_selection_is_shown_before_it_is_done_to_each(site, db) -> None:
    page = site(allow_actions=True)
    db.execute(
        "select pgqueue.enqueue('q', unique_key => 'k' || n) from generate_series(1, 4) n"
    )
    kill(db, "q", "boom")
    first, second, third, kept = column(
        db, "select id from pgqueue.dead_job order by id"
    )
    db.execute("select pgqueue.enqueue('q', unique_key => 'k2')")
    where = f"/jobs?state=dead&queue={quote('q')}"
    assert {first, kept} <= set(ids(page.get(where).text))
    query = urlencode(
        {"action": "retry", "id": [first, second, third], "back": where}, doseq=True
    )
    sure = page.get(f"/confirm?{query}")
    assert "3 jobs would be redriven" in Found(sure.text).text
    assert one(db, "select count(*) from pgqueue.dead_job") == 4
    # One that somebody else has sent back meanwhile stops no other.
    db.execute("select pgqueue.redrive_job(%s)", (third,))
    done = send(page, sure, "Retry 3 jobs")
    assert done.headers["Location"] == where
    assert said(page, done) == (
        "1 job redriven. 2 jobs changed meanwhile, or had a unique key that was taken."
    )
    assert column(db, "select id from pgqueue.dead_job order by id") == [second, kept]
    again = page.get(f"/confirm?{query}")
    assert "2 jobs of those selected changed meanwhile" in Found(again.text).text


def test_what_is_due_later_is_made_due_and_what_waits_is_cancelled(site, db) -> None:
    page = site(allow_actions=True)
    query = "select pgqueue.enqueue('q', run_at => now() + interval '1 d') from generate_series(1, 3)"
    some = column(db, query)
    for action, label in ("run_now", "Run now 2 jobs"), ("cancel", "Cancel 2 jobs"):
        asked = urlencode(
            {"action": action, "id": some[:2], "back": "/jobs"}, doseq=True
        )
        done = said(page, send(page, page.get(f"/confirm?{asked}"), label))
        assert done.startswith("2 jobs")
        if action == "run_now":
            ready = "select id from pgqueue.jobs where state = 'ready' order by id"
            assert column(db, ready) == some[:2]
    assert column(db, "select id from pgqueue.jobs") == some[2:]


def test_all_that_match_are_ended_after_a_dry_run(site, db) -> None:
    page = site(allow_actions=True)
    db.execute("select pgqueue.enqueue(q) from unnest('{q,q,r}'::text[]) as q")
    sure = press(page, "/jobs?queue=q", "Cancel")
    assert "2 jobs would be cancelled" in Found(sure.text).text
    assert one(db, "select count(*) from pgqueue.job") == 3
    done = send(page, sure, "Cancel")
    assert done.headers["Location"] == "/jobs?queue=q"
    assert said(page, done) == "2 jobs cancelled, or asked to stop."
    db.execute("select pgqueue.enqueue('q')")
    kill(db, "q", "boom 1")
    kill(db, "r", "other")
    sure = press(page, "/jobs?state=dead&error=boom%25", "Discard")
    assert "1 job would be deleted" in Found(sure.text).text
    assert said(page, send(page, sure, "Discard")) == "1 job deleted."
    assert column(db, "select error from pgqueue.dead_job") == ["other"]
    # Where a filter is not one of the function there is no such button.
    assert "All that match" not in page.get("/jobs?state=dead&worker=killer").text


def test_the_number_of_an_error_leads_to_the_jobs_that_it_counts(site, db) -> None:
    page = site(allow_actions=True)
    alike = "OperationalError: the connection to the server at db.example.internal: "
    for number, why in enumerate(("refused", "50% of \\ are gone " + "é" * 500), 1):
        db.execute("select pgqueue.enqueue('q') from generate_series(1, %s)", (number,))
        kill(db, "q", alike + why)
    links = re.findall(r'href="(/jobs\?[^"]*)">(\d)</a>', page.get("/dead").text)
    assert sorted(number for _, number in links) == ["1", "2"]
    for link, number in links:
        shown = page.get(unescape(link))
        assert len(ids(shown.text)) == int(number)
        sure = send(page, shown, "Discard")
        assert f"{number} job{'s' * (number == '2')} would be deleted" in sure.text


def test_nothing_selected_and_another_site_to_go_back_to_are_refused(site, db) -> None:
    page = site(allow_actions=True)
    assert page.get("/confirm?action=cancel&back=/jobs").status == 404
    for back in (
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "/a b",
        "x",
    ):
        query = urlencode({"action": "cancel", "id": 1, "back": back})
        assert page.get(f"/confirm?{query}").status == 400
    assert site().get("/confirm?action=cancel&id=1").status == 403
    assert page.get("/confirm?action=pause&id=1").status in (400, 404)
    assert page.get("/confirm?action=drop&id=1").status == 404


@pytest.fixture(scope="module", params=["no statistics", "analyzed"])
def many(template, request) -> Iterator[str]:
    """Make a database with many jobs."""
    with database(template) as dsn:
        with psycopg.connect(dsn, autocommit=True) as db:
            add_many(db)
            if request.param == "analyzed":
                # Many batches, by which the planner guesses how many jobs one has.
                db.execute(
                    "insert into pgqueue.tally (batch_id, part, jobs) select -n % 200, n, 1"
                    " from generate_series(1, 20000) as n"
                )
                db.execute("analyze pgqueue.job, pgqueue.dead_job, pgqueue.tally")
        yield dsn


def add_many(db: psycopg.Connection) -> None:
    """Make 60,000 jobs and as many dead ones, of which no statistics are known."""
    for table in "job", "dead_job":
        db.execute(f"alter table pgqueue.{table} set (autovacuum_enabled = off)")
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, payload)"
        " select now() - n * interval '1 ms', now(), n % 3, 20, 'q' || n % 3, 'k' || n % 7,"
        " case when n % 3 = 2 then 'g' || n % 5 end, to_jsonb(n) from generate_series(1, 60000) as n"
    )
    db.execute(
        "insert into pgqueue.dead_job (id, died_at, enqueued_at, run_at, priority, attempt, max_attempts,"
        " queue, kind, error, payload, errors) select n + 100000, now() - n * interval '1 s', now(), now(), 0, 1,"
        " 1, 'q' || n % 3, 'k' || n % 7, 'boom', '{}', '[]' from generate_series(1, 60000) as n"
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"queue": "q1"},
        {"queue": "q2", "group": "g2"},
        {"queue": "q1", "key": "k"},
        {"payload": "0"},
        {"error": "x"},
        {"state": "blocked", "queue": "q1"},
        {"state": "running"},
        {"worker": "w"},
        {"batch": "1"},
        {"state": "dead"},
        {"state": "dead", "queue": "q1", "error": "x"},
        {"state": "dead", "queue": "q1", "kind": "k1", "error": "x"},
        {"state": "completed"},
    ],
    ids=str,
)
def test_no_page_reads_more_than_a_bounded_part_of_what_is_there(many, asked) -> None:
    read_by: list[int] = []

    class Explained(Reading):
        def rows(self, query, **values):
            explain = "explain (analyze, buffers, timing off, format json) "
            plan = self.conn.execute(explain + query, {"shown": 0, **values})
            (top,) = plan.fetchone()["QUERY PLAN"]
            assert "Seq Scan" not in json.dumps(top["Plan"]).replace(
                "queue_in_force", ""
            )
            hit, fetched = "Shared Hit Blocks", "Shared Read Blocks"
            read_by.append(top["Plan"][hit] + top["Plan"][fetched])
            return super().rows(query, **values)

        def row(self, query, **values):
            return next(iter(self.rows(query, **values)), None)

    def look(reading: Reading) -> Page:
        return search.page(Explained(reading.conn, asked, reading.rights))

    assert read(many, look, asked).context["jobs"] is not None
    # 5,000 rows of the walk, each with a page of the table and a few of the key's index.
    assert sum(read_by) < (100 if "batch" in asked else 8 * search.LOOKED)


def asked_by(dsn: str, page: Callable[[Reading], Page], **asked: str) -> dict[str, int]:
    """Return how much of the server's memory each query of a page reads, in pages of 8 kB."""
    read_by: dict[str, int] = {}

    class Counted(Reading):
        def rows(self, query, **values):
            explain = "explain (analyze, buffers, timing off, format json) "
            (top,) = super().rows(explain + query, **values)[0]["QUERY PLAN"]
            plan = top["Plan"]
            read_by[query] = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
            return super().rows(query, **values)

        def row(self, query, **values):
            return next(iter(self.rows(query, **values)), None)

    read(dsn, lambda reading: page(Counted(reading.conn, asked, reading.rights)), asked)
    return read_by


def test_what_the_dashboard_asks_of_a_hundred_long_queues_it_reads_of_short_ones(
    db, dsn
) -> None:
    """Long enough that jobs are not all read: of 16 MB and more."""

    def add(jobs: int) -> None:
        db.execute(
            "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)"
            " select clock_timestamp() - interval '1 hour' + n * interval '1 us', now(), 0, 20, 'q' || n %% 100,"
            " 'k', to_jsonb(repeat('x', 400)) from generate_series(1, %s) as n",
            (jobs,),
        )

    def look() -> dict[str, int]:
        return {
            **asked_by(dsn, pages.queues),
            **asked_by(dsn, pages.queue, name="q7"),
            **asked_by(dsn, pages.running),
            **asked_by(dsn, pages.workers),
        }

    add(40_000)
    db.execute(
        "select pgqueue.claim('q' || n, 'w', case n when 7 then 150 else 2 end)"
        " from generate_series(0, 99) as n"
    )
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select 1, 1, n, clock_timestamp(), '1 s', '1 s', 'q' || n % 100, 'k', 'completed', 'w'"
        " from generate_series(1, 5000) as n"
    )
    db.execute("analyze pgqueue.job")
    assert one(db, "select pg_relation_size('pgqueue.job')") > 1 << 24
    few = look()
    assert len(few) > 12
    add(100_000)
    assert one(db, "select count(*) from pgqueue.running") == 150 + 2 * 99
    for query, count in look().items():
        assert count < 1.2 * few[query] + 1_500, query  # of one queue 1,200 jobs
        assert count < (100_000 if "health" in query else 50_000), query


def test_what_a_page_of_your_own_asks_reads_as_little(db) -> None:
    add_many(db)
    (block,) = documents.blocks(OWN_PAGE)
    db.execute("select pgqueue.enqueue('emails')")
    db.execute("select pgqueue.complete(id, token) from pgqueue.claim('emails', 'w')")
    # As autovacuum leaves them.
    db.execute("analyze pgqueue.job, pgqueue.dead_job, pgqueue.run")
    explain = "explain (analyze, buffers, timing off, format json) "
    queries = re.sub("^--.*", "", block.text, flags=re.M).split(";")[:-1]
    assert len(queries) == 13
    for query in queries:
        (top,) = db.execute(explain + query).fetchone()[0]
        plan = top["Plan"]
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 3000, query


def test_a_page_of_your_own_finds_the_dead_jobs_that_redrive_would(db) -> None:
    error = "ValueError: report 9 has no rows\n\nTraceback (most recent call last): …"
    db.execute("select pgqueue.enqueue('emails')")
    kill(db, "emails", error)
    (block,) = documents.blocks(OWN_PAGE)
    (query,) = re.findall(
        "^select [^;]* from pgqueue.dead_job$[^;]*;", block.text, re.M
    )
    assert column(db, query) == []
    pattern = "(select error_like from pgqueue.dead)"
    ids = column(db, query.replace("'timeout%'", pattern))
    redriven = f"select pgqueue.redrive('emails', error_like => {pattern})"
    assert ids == column(db, redriven) != []


def test_the_pages_find_the_first_jobs_of_a_queue_by_its_index(db) -> None:
    """A queue with a tenth of all jobs, behind the others."""
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)"
        " select now(), now(), 0, 20, case when n > 90000 then 'emails' else 'q' || n % 100 end, 'k', '{}'"
        " from generate_series(1, 100000) as n"
    )
    db.execute("analyze pgqueue.job")
    assert "enable_bitmapscan = off" in OWN_PAGE
    db.execute("set enable_bitmapscan = off")
    explain = "explain (analyze, buffers, timing off, format json) "
    playbook = documents.sections("docs/playbook.md")["Nothing moves"]
    for page in OWN_PAGE, playbook:
        text = "\n".join(block.text for block in documents.blocks(page, "sql"))
        selects = re.findall("^select .*?;", text, flags=re.M | re.S)
        (query,) = [q for q in selects if "from pgqueue.jobs" in q and "'emails'" in q]
        # Without why, which counts the jobs ahead.
        found = query.replace("pgqueue.why(id)", "id")
        (top,) = db.execute(explain + found).fetchone()[0]
        plan = top["Plan"]
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 150, query
