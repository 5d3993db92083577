"""The dashboard, asked as a browser asks; test_dashboard_browser.py looks at it in one."""

import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import documents
import psycopg
import pytest
from cluster import Cluster
from conftest import column, one
from dashboard_site import PAGES, Answer, Site, kill
from pgqueue.dashboard import app, pages
from pgqueue.dashboard.pages import Page, Reading, read
from recipes import blocks
from starlette.applications import Starlette
from starlette.routing import Mount
from test_health import standby_of
from worker_harness import where

pytest_plugins = ["dashboard_site", "command_line", "worker_harness"]

NASTY = (
    "</code><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;{{7*7}}\u202e"
)


@dataclass
class Form:
    action: str
    fields: dict[str, str]
    method: str = "post"
    label: str = ""


class Found(HTMLParser):
    """The elements, the rows of tables as texts, and the forms of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.forms: list[Form] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(text)
        self.rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "form":
            method = attributes.get("method", "get")
            self.forms.append(Form(attributes["action"], {}, method))
        elif tag == "input" and "form" in self.inside and "name" in attributes:
            self.forms[-1].fields[attributes["name"]] = attributes.get("value", "")
        if tag in ("input", "meta", "link", "img"):
            self.inside.pop()

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.inside):
            self.rows[-1][-1] += data
        if "button" in self.inside and self.forms:
            self.forms[-1].label += data

    @property
    def posts(self) -> list[Form]:
        return [form for form in self.forms if form.method == "post"]


def press(site: Site, path: str, label: str, **changes: str):
    """Send the form that has this button, as it stands on that page."""
    return send(site, site.get(path), label, **changes)


def send(site: Site, page: Answer, label: str, **changes: str):
    """Send the form that has this button, as it stands there."""
    forms = [f for f in Found(page.text).forms if f.label == label]
    assert forms, f"no button {label}"
    form = forms[0]
    fields = {**form.fields, **changes}
    if form.method == "get":
        return site.get(f"{form.action}?{urlencode(fields)}")
    return site.post(form.action, fields)


def said(site: Site, done: Answer) -> str:
    """Go where an action sends us, and return what that page says of it."""
    assert done.status == 303
    cookie = done.headers["Set-Cookie"].split(";")[0]
    answer = site.get(done.headers["Location"], Cookie=cookie)
    assert answer.status == 200
    (text,) = re.findall(
        '<p id="said" role="status" tabindex="-1">(.*)</p>', answer.text
    )
    # It is said once.
    assert 'pgqueue-said="";' in answer.headers["Set-Cookie"]
    return html.unescape(text)


def is_paused(db, queue: str) -> bool:
    return one(db, "select paused from pgqueue.queues where queue = %s", queue)


def test_a_page_with_nothing_to_show_says_so(site) -> None:
    page = site()
    for path in PAGES:
        answer = page.get(path)
        assert answer.status == 200
        assert Found(answer.text).rows == [], path
        assert re.search(r"<p>(No|Nothing|There are no) ", answer.text), path


@pytest.mark.parametrize("queues", [10, 1001])
def test_queues_are_shown_as_the_view_has_them(site, db, queues) -> None:
    db.execute(
        "select pgqueue.enqueue('q' || n) from generate_series(1, %s) as n,"
        " generate_series(1, n %% 3 + 1)",
        (queues,),
    )
    db.execute(
        "select pgqueue.fail(id, token, 'x', '1 hour') from pgqueue.claim('q1', 'w')"
    )
    kill(db, "q2", "boom")
    db.execute("select pgqueue.claim('q3', 'w')")
    db.execute("select pgqueue.pause('q4')")
    found = Found(site().get("/").text)
    rows = found.rows[1:]
    shown = [[row[0].split()[0], *map(int, row[1:2] + row[3:8])] for row in rows]
    columns = "queue, ready, running, scheduled, blocked, expired, dead"
    query = f"select {columns} from pgqueue.queues order by queue limit 1000"
    assert shown == [list(row) for row in db.execute(query)]
    assert [r[0] for r in rows if "paused" in r[0]] == ["q4 paused"]
    assert ("first 1,000 of 1,001 queues" in found.text) == (queues > 1000)


def test_queues_are_found_by_name_and_ordered_by_what_needs_a_look(site, db) -> None:
    db.execute("select pgqueue.enqueue(q) from unnest('{mails,Mail,other}'::text[]) q")
    db.execute("select pgqueue.enqueue('other')")
    page = site()
    first = [row[0] for row in Found(page.get("/?order=ready").text).rows[1:]]
    assert first[0] == "other"
    found = [row[0] for row in Found(page.get("/?name=MAIL").text).rows[1:]]
    assert found == ["Mail", "mails"]
    assert page.get("/?order=nonsense").status == 200


def test_long_names_that_begin_alike_can_be_told_apart(site, db) -> None:
    start = "reports.quarterly." * 8
    for end in ("invoices", "payments"):
        db.execute("select pgqueue.enqueue(%s)", (start + end,))
        kill(db, start + end, "boom")
        db.execute("select pgqueue.enqueue(%s)", (start + end,))
    for path in ("/", "/dead", "/jobs"):
        text = Found(site().get(path).text).text
        for end in ("invoices", "payments"):
            assert f"…rly.{end}" in text, path
            assert start + end not in text, path


def test_what_health_says_comes_first(site, db, role) -> None:
    query = "select pgqueue.enqueue('q' || n, run_at => now() - interval '1 hour')"
    ids = column(db, f"{query} from generate_series(1, 60) as n")
    text = " ".join(Found(site().get("/").text).text.split())
    before, first, second = re.split(r"critical (?:waits|workers) \(60\):", text)
    assert before.endswith("Health: 120 critical ")
    assert "and 55 more, 55 of them critical" in first
    assert f"select pgqueue.why({ids[0]})" in first and "60 of 60 queues" in second
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    db.execute(f"revoke execute on function pgqueue.health() from {role}")
    assert site(user=role).get("/").status == 200


def test_a_job_is_told_from_its_queue_to_its_end(site, db) -> None:
    page = site()
    id = one(db, """select pgqueue.enqueue('q', '{"to": "ada"}', kind => 'k')""")
    path = f"/job?id={id}"
    assert "ready: next in its queue" in page.get(path).text
    token = one(db, "select token from pgqueue.claim('q', 'me')")
    db.execute("select pgqueue.progress(%s, %s, 3, 12, 'copying')", (id, token))
    for seen in page.get(path).text, page.get("/running").text:
        assert "25 %" in seen and "copying" in seen and "me" in seen
    db.execute("select pgqueue.fail(%s, %s, 'first error', '0 s')", (id, token))
    assert "first error" in page.get(path).text
    token = one(db, "select token from pgqueue.claim('q', 'me')")
    db.execute("""select pgqueue.complete(%s, %s, '"the result"')""", (id, token))
    seen = Found(page.get(path).text)
    assert "completed at" in seen.text
    assert [row[:2] for row in seen.rows[1:]] == [["2", "completed"], ["1", "retry"]]
    assert '"the result"' in seen.rows[1][-1]


def test_a_payload_is_shown_on_request_and_only_to_an_operator(site, db, role) -> None:
    id = one(db, """select pgqueue.enqueue('q', '{"secret": 1}')""")
    kill(db, "q", "boom")
    page = site()
    assert "secret" not in page.get(f"/job?id={id}").text
    assert "secret" in page.get(f"/job?id={id}&payload=1").text
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    seen = site(user=role).get(f"/job?id={id}&payload=1").text
    assert "secret" not in seen and "dead since" in seen and "operator" in seen


def test_dead_jobs_are_shown_by_error_and_long_ones_are_cut(site, db) -> None:
    for n in range(3):
        db.execute("select pgqueue.enqueue('q')")
        kill(db, "q", f"Timeout after {n} s\n" + "x" * 50_000)
    db.execute("select pgqueue.enqueue('other')")
    kill(db, "other", "KeyError: 'a'")
    page = site()
    rows = Found(page.get("/dead").text).rows[1:]
    assert [row[:4] for row in rows] == [
        ["3", "Timeout after % s", "q", "q"],
        ["1", "KeyError: %", "other", "other"],
    ]
    assert len(Found(page.get("/dead?queue=other").text).rows) == 2
    id = one(db, "select max(id) from pgqueue.dead_job where queue = 'q'")
    assert len(page.get(f"/job?id={id}").text) < 40_000


@pytest.mark.parametrize("errors", [3, 50_000])
def test_of_100_000_dead_jobs_the_most_frequent_errors_are_shown(
    site, db, errors
) -> None:
    db.execute(
        "insert into pgqueue.dead_job (id, died_at, enqueued_at, run_at, priority,"
        " attempt, max_attempts, queue, kind, error, payload, errors)"
        " select n, now(), now(), now(), 0, 1, 1, 'q', 'k', 'TheError '"
        " || translate((n %% %s)::text, '0123456789', 'abcdefghij') || repeat(' w', 200),"
        " '{}', '[]' from generate_series(1, 100000) as n",
        (errors,),
    )
    page = site(allow_actions=True)
    answer = page.get("/dead")
    found = Found(answer.text)
    assert len(found.rows) == 1 + min(errors, 200)
    assert len(answer.text) < 500_000
    assert all(row[0].startswith("≈") for row in found.rows[1:])
    assert f"{errors} different errors in a sample" in found.text or errors > 200
    dry = press(page, "/dead", "Dry run")
    assert "would be redriven" in dry.text and len(dry.text) < 50_000
    assert "≈" in page.get("/").text and page.get("/queue?name=q").status == 200
    db.execute("select setval('pgqueue.job_id_seq', 100000)")
    db.execute("select pgqueue.enqueue('rare')")
    kill(db, "rare", "boom")
    few = page.get("/dead?queue=rare").text
    assert "1 job is dead" in few and "/jobs?state=dead&amp;queue=rare" in few


def test_hostile_text_is_nothing_but_text(site, db) -> None:
    name = NASTY[:120]
    for text in (name, "a\r\nb", "ä/../?&#%00", " "):
        db.execute(
            "select pgqueue.enqueue(%(t)s, to_jsonb(%(t)s::text), kind => %(t)s,"
            " group_key => %(t)s, unique_key => %(t)s || n, headers => %(h)s)"
            " from generate_series(1, 4) as n",
            {"t": text, "h": json.dumps({"x": NASTY})},
        )
        kill(db, text, NASTY + "\n" + NASTY, jobs=1)
        id, token = db.execute(
            "select id, token from pgqueue.claim(%s, %s)", (text, NASTY)
        ).fetchone()
        db.execute("select pgqueue.progress(%s, %s, 1, 2, %s)", (id, token, NASTY))
        db.execute(
            "select pgqueue.save_step(%s, %s, %s, %s)",
            (id, token, name, json.dumps(NASTY)),
        )
        db.execute(
            "select pgqueue.suspend(id, token, %s) from pgqueue.claim(%s, 'w')",
            (name, text),
        )
    db.execute("select pgqueue.schedule(%s, %s, every => '1 h')", (name, name))
    db.execute("select pgqueue.create_batch(%s)", (name,))
    page = site(allow_actions=True)
    ids = column(db, "select id from pgqueue.job union select id from pgqueue.dead_job")
    paths = [*PAGES, *(f"/job?id={id}&payload=1&log=1" for id in ids)]
    names = column(db, "select queue from pgqueue.queues")
    assert len(names) == 4
    paths += [f"/queue?name={quote(name, safe='')}" for name in names]
    for path in paths:
        answer = page.get(path)
        found = Found(answer.text)
        assert answer.status == 200, path
        tags = [tag for tag, _ in found.tags]
        assert tags.count("script") == 1 and "img" not in tags
        inline = {k for _, a in found.tags for k in a if k[:2] == "on" or k == "style"}
        assert not inline
        whole = [attributes.get("title") for _, attributes in found.tags]
        assert name in found.text or name in whole or path not in PAGES
    # A browser changes the ends of lines in what it sends back.
    press(page, "/queue?name=a%0D%0Ab", "Pause")
    assert is_paused(db, "a\r\nb")


def test_what_is_not_there_is_told_apart_from_what_is_wrong(site) -> None:
    page = site()
    for path, status in (
        ("/queue?name=unknown", 404),
        ("/queue?name=%00", 400),
        ("/job?id=7", 404),
        ("/job?id=one", 404),
        ("/job?id=" + "9" * 30, 404),
        ("/job?id=" + "9" * 9000, 404),
        ("/job", 404),
        ("/nowhere", 404),
        ("/static/../web.py", 404),
        ("/action/pause", 405),
    ):
        answer = page.get(path)
        assert answer.status == status, path
        (said,) = re.findall('<p class="why">(.+)</p>', answer.text)
        assert said != HTTPStatus(status).phrase, path


def test_every_answer_forbids_what_is_not_its_own(site) -> None:
    page = site()
    answers = [page.get(p) for p in ("/", "/nowhere", "/static/dashboard.js")]
    answers += [page.get("/", Host="evil.example"), page.post("/action/pause", {})]
    for answer in answers:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"


def test_it_answers_only_to_names_of_this_machine(site) -> None:
    page = site()
    for host, status in (
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("localhost:80@evil.example", 421),
        ("", 421),
    ):
        assert page.get("/", Host=host).status == status, host


def test_it_answers_to_names_that_it_was_given(site) -> None:
    page = site(hosts=["jobs.example"])
    assert page.get("/", Host="jobs.example:443").status == 200
    assert page.get("/", Host="localhost").status == 421


def test_a_single_name_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(TypeError, match="list of names"):
        app(hosts="*.example")


def test_each_action_does_what_the_function_of_that_name_does(site, db) -> None:
    page = site(allow_actions=True)
    later = one(db, "select pgqueue.enqueue('q', run_at => now() + interval '1 day')")
    answer = press(page, "/queue?name=q", "Pause")
    assert (answer.status, answer.headers["Location"]) == (303, "/queue?name=q")
    assert is_paused(db, "q")
    press(page, "/queue?name=q", "Resume")
    assert not is_paused(db, "q")
    press(page, f"/job?id={later}", "Run now")
    assert column(db, "select id from pgqueue.claim('q', 'me')") == [later]
    sure = press(page, f"/job?id={later}", "Cancel")
    assert "1 job would be cancelled" in Found(sure.text).text
    query = "select cancelled_at is not null from pgqueue.jobs where id = %s"
    assert not one(db, query, later)
    assert "asked to stop" in said(page, send(page, sure, "Cancel 1 job"))
    query = "select cancelled_at is not null from pgqueue.jobs where id = %s"
    assert one(db, query, later)


def test_redrive_shows_first_what_it_would_redrive(site, db) -> None:
    page = site(allow_actions=True)
    for error in "Timeout after 1 s", "Timeout after 2 s", "KeyError: 'a'":
        db.execute("select pgqueue.enqueue('q')")
        kill(db, "q", error)
    dry = press(page, "/dead", "Dry run")
    assert "2 jobs would be redriven" in Found(dry.text).text
    assert one(db, "select count(*) from pgqueue.dead_job") == 3
    some = said(page, send(page, dry, "Redrive", max_jobs="1"))
    assert "1 job redriven" in some and "More" in some
    assert said(page, send(page, dry, "Redrive")) == "1 job redriven."
    assert column(db, "select error from pgqueue.dead_job") == ["KeyError: 'a'"]
    assert one(db, "select count(*) from pgqueue.job") == 2


def test_what_an_action_has_done_is_said_once_and_a_reload_does_nothing(
    site, db
) -> None:
    db.execute("select pgqueue.enqueue('q <b>')")
    page = site(allow_actions=True)
    done = press(page, "/queue?name=q%20%3Cb%3E", "Pause")
    assert said(page, done) == "Paused: queue q <b>. Running jobs go on."
    again = page.get(done.headers["Location"])
    assert again.status == 200 and 'id="said"' not in again.text


def test_a_dead_job_is_retried_or_discarded_on_its_page(site, db) -> None:
    page = site(allow_actions=True)
    for _ in range(2):
        db.execute("select pgqueue.enqueue('q', unique_key => 'k')")
        kill(db, "q", "boom")
    first, second = column(db, "select id from pgqueue.dead_job order by id")
    done = said(page, press(page, f"/job?id={first}", "Retry"))
    assert done == f"Job {first} was redriven."
    done = said(page, press(page, f"/job?id={second}", "Retry"))
    assert done == f"Job {second} stays dead: another job has its unique key."
    sure = press(page, f"/job?id={second}", "Discard")
    assert "1 job would be deleted" in Found(sure.text).text
    assert one(db, "select count(*) from pgqueue.dead_job") == 1
    assert said(page, send(page, sure, "Discard 1 job")) == f"Job {second} is deleted."
    assert one(db, "select count(*) from pgqueue.dead_job") == 0


def test_an_ended_job_shows_its_kept_payload_and_can_be_run_again(site, db) -> None:
    page = site(allow_actions=True)
    ids = []
    for keeps in False, True:
        db.execute("select pgqueue.configure(null, keep_payloads => %s)", (keeps,))
        ids.append(one(db, """select pgqueue.enqueue('q', '{"to": "ada"}')"""))
        db.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')")
    plain = page.get(f"/job?id={ids[0]}&payload=1").text
    assert "keep_payloads" in plain and "Run again" not in plain
    assert "ada" in page.get(f"/job?id={ids[1]}&payload=1").text
    sure = press(page, f"/job?id={ids[1]}", "Run again")
    assert one(db, "select count(*) from pgqueue.job") == 0
    done = send(page, sure, "Run again")
    new = one(db, "select id from pgqueue.job")
    assert done.headers["Location"] == f"/job?id={new}"
    assert said(page, done) == f"Job {ids[1]} was enqueued again, as this job {new}."


def test_a_long_payload_says_how_much_of_it_is_missing(site, db) -> None:
    id = one(db, "select pgqueue.enqueue('q', to_jsonb(repeat('x', 30000)))")
    seen = site().get(f"/job?id={id}&payload=1").text
    assert "and 10,002 more characters" in seen


def test_a_job_has_links_to_what_it_waits_for_and_to_its_batch(site, db) -> None:
    batch = one(db, "select pgqueue.create_batch('q')")
    first = one(db, "select pgqueue.enqueue('q', batch_id => %s)", batch)
    query = "select pgqueue.enqueue('q', kind => 'next', after => array[%s::bigint])"
    second = one(db, query, first)
    page = site()
    for id, links in (
        (first, {f"/job?id={second}", f"/batch?id={batch}"}),
        (second, {f"/job?id={first}"}),
    ):
        hrefs = {a.get("href") for _, a in Found(page.get(f"/job?id={id}").text).tags}
        assert links <= hrefs
    kill(db, "q", "boom")
    assert f"/batch?id={batch}" in page.get(f"/job?id={first}").text


def test_a_job_shows_its_steps_and_what_it_is_suspended_for(site, db, role) -> None:
    id = one(db, "select pgqueue.enqueue('q')")
    first = one(db, "select pgqueue.enqueue('other')")
    db.execute(
        "select pgqueue.save_step(id, token, 'page ' || n, to_jsonb(repeat('x', n * 700)))"
        " from pgqueue.claim('q', 'w') cross join generate_series(1, 2) as n"
    )
    page = site(allow_actions=True)
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    as_reader = site(user=role)

    def shown(page=page) -> tuple[dict[str, str], list[list[str]], set[str]]:
        text = page.get(f"/job?id={id}").text
        facts = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text, re.DOTALL)
        found = Found(text)
        steps = [row for row in found.rows if len(row) == 3]
        return dict(facts), steps, {str(a.get("href")) for _, a in found.tags}

    facts, steps, _ = shown()
    assert [row[0] for row in steps] == ["Step", "page 2", "page 1"]
    assert "ago" in steps[1][1]
    # The first line of each, and all of it on request: the longer one is cut.
    assert [steps[1][2].count("x"), steps[2][2].count("x")] == [119 + 999, 119 + 700]
    assert not {"Suspended", "Until event"} & facts.keys()

    db.execute(
        "select pgqueue.suspend(id, token, '<paid>', now() + interval '3 days', %s)"
        " from pgqueue.job where id = %s",
        ([first], id),
    )
    for page_of in (page, as_reader):
        facts, steps, links = shown(page_of)
        assert facts["Until event"] == "&lt;paid&gt;"
        assert "ago" in facts["Suspended"] and "(in " in facts["Due"]
        assert f"/job?id={first}" in links
        assert len(steps) == (3 if page_of is page else 0)

    assert said(page, press(page, f"/job?id={id}", "Run now"))
    facts, steps, links = shown()
    assert not {"Suspended", "Until event"} & facts.keys() and len(steps) == 3
    assert f"/job?id={first}" not in links
    # They stay with a dead job, and of very many the last are shown.
    db.execute(
        "select pgqueue.save_step(id, token, 'row ' || n)"
        " from pgqueue.claim('q', 'w') cross join generate_series(1, 300) as n"
    )
    db.execute(
        "select pgqueue.fail(id, token, 'x', permanent => true) from pgqueue.job where id = %s",
        (id,),
    )
    _, steps, _ = shown()
    assert len(steps) == 201 and steps[1][0] == "row 300"
    assert "The last 200 of 302 steps." in page.get(f"/job?id={id}").text


def test_each_attempt_of_a_dead_job_is_there_with_its_traceback(site, db) -> None:
    id = one(db, "select pgqueue.enqueue('q', max_attempts => 3)")
    for n in range(3):
        db.execute(
            "select pgqueue.fail(id, token, %s, '0 s') from pgqueue.claim('q', 'w')",
            (f"Error {n}\n  File mail.py, line {n}",),
        )
    seen = Found(site().get(f"/job?id={id}").text)
    assert [f"mail.py, line {n}" in seen.text for n in range(3)] == [True] * 3
    outcomes = [row[1] for row in seen.rows if len(row) == 7]
    assert outcomes == ["Outcome", "dead", "retry", "retry"]


def test_the_jobs_of_an_error_are_listed_and_can_be_discarded(site, db) -> None:
    page = site(allow_actions=True)
    for error in ("100 % \\ of it_\nat line 1", "100 percent", "abc_\\" * 99):
        db.execute("select pgqueue.enqueue('q &')")
        kill(db, "q &", error)
    dead = page.get("/dead").text
    links = [
        a["href"] for _, a in Found(dead).tags if "state=dead" in a.get("href", "")
    ]
    assert len(links) == 3
    for link in links:
        assert len(Found(page.get(link).text).rows) == 2
    forms = [f for f in Found(dead).forms if f.label == "Dry run"]
    (form,) = [f for f in forms if "of it" in f.fields["of"]]
    dry = page.get(f"{form.action}?{urlencode(form.fields)}")
    sure = send(page, dry, "Discard instead")
    assert said(page, send(page, sure, "Discard")) == "1 job deleted."
    assert one(db, "select count(*) from pgqueue.dead_job") == 2


@pytest.mark.parametrize(
    ("span", "ago", "seen"),
    [
        ("hour", "0 s", True),
        ("hour", "61 min", False),
        ("day", "23 h", True),
        ("day", "25 h", False),
        ("week", "6 d", True),
        ("week", "8 d", False),
        ("nonsense", "0 s", True),
    ],
)
def test_the_charts_of_a_queue_go_back_a_week(site, db, span, ago, seen) -> None:
    db.execute("select pgqueue.enqueue('q')")
    db.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')")
    query = "update pgqueue.run set finished_at = now() - %s::interval, waited = '7 s'"
    db.execute(query, (ago,))
    db.execute("select pgqueue.enqueue('q')")
    answer = site().get(f"/queue?name=q&span={span}")
    found = Found(answer.text)
    labels = [a.get("aria-label", "") for tag, a in found.tags if tag == "svg"]
    assert labels == [] if not seen else ["at most 7.0 s" in text for text in labels] == [
        False, True, False
    ]  # fmt: skip
    assert ("No attempt has ended in that time" in found.text) != seen
    assert seen == any(row[1:3] == ["1", "0"] for row in found.rows)


def paused(db) -> list[tuple]:
    query = (
        "select queue, kind, group_key from pgqueue.settings where setting = 'paused'"
        " and value = 'true' and set_for not like 'all%' order by 1, 2, 3"
    )
    return db.execute(query).fetchall()


def test_kinds_and_groups_are_paused_and_resumed_by_row_and_by_name(site, db) -> None:
    page, path = site(allow_actions=True), "/queue?name=q"
    db.execute("select pgqueue.enqueue('q', kind => 'k', group_key => 'g')")
    forms = [f for f in Found(page.get(path).text).posts if f.label == "Pause"]
    _, kind, group = forms
    assert said(page, page.post(kind.action, kind.fields)) == (
        "Paused: kind k of queue q. Running jobs go on."
    )
    done = page.post(group.action, group.fields)
    assert done.headers["Location"] == path
    assert paused(db) == [("q", "k", None), ("q", None, "g")]
    by_name = press(page, path, "Pause it", kind="a <b>", group_key="c")
    assert said(page, by_name).startswith("Paused: kind a <b> and group c of queue q.")
    seen = Found(page.get(path).text)
    assert "Paused: kind a <b> and group c" in " ".join(seen.text.split())
    assert [row[0] for row in seen.rows if "paused" in row[0]] == [
        "k paused",
        "g paused",
        "paused",  # the settings
        "paused",
        "paused",
    ]
    while resume := [
        f for f in Found(page.get(path).text).posts if f.label == "Resume"
    ]:
        assert page.post(resume[0].action, resume[0].fields).status == 303
    assert paused(db) == []


def test_all_queues_are_paused_and_resumed_once_it_is_confirmed(site, db) -> None:
    db.execute("select pgqueue.enqueue(q) from unnest('{q,r}'::text[]) as q")
    page = site(allow_actions=True)
    sure = press(page, "/", "Pause all queues")
    assert not is_paused(db, "q") and "No queue hands out jobs" in sure.text
    done = send(page, sure, "Pause all queues")
    assert done.headers["Location"] == "/" and is_paused(db, "q") and is_paused(db, "r")
    send(page, press(page, "/", "Resume all queues"), "Resume all queues")
    assert not is_paused(db, "q")


def test_a_schedule_is_paused_resumed_and_run_at_once(site, db) -> None:
    page = site(allow_actions=True)
    db.execute(
        """select pgqueue.schedule('s <b>', 'q', '@daily', payload => '{"a": 1}')"""
    )
    assert said(page, press(page, "/schedules", "Pause")) == "Paused: schedule s <b>."
    assert one(db, "select paused from pgqueue.schedules")
    sure = press(page, "/schedules", "Run now")
    assert one(db, "select count(*) from pgqueue.job") == 0
    done = send(page, sure, "Run now")
    id, payload = db.execute("select id, payload from pgqueue.job").fetchone()
    assert payload == {"a": 1} and done.headers["Location"] == f"/job?id={id}"
    press(page, "/schedules", "Resume")
    assert not one(db, "select paused from pgqueue.schedules")


def test_a_batch_is_shown_with_its_jobs(site, db) -> None:
    batch = one(db, "select pgqueue.create_batch('after')")
    query = "select pgqueue.enqueue('q', batch_id => %s) from generate_series(1, 300)"
    ids = column(db, query, batch)
    kill(db, "q", "boom", jobs=1)
    page = site()
    assert f"/batch?id={batch}" in page.get("/batches").text
    seen = Found(page.get(f"/batch?id={batch}").text)
    assert seen.rows[1][:2] == [str(ids[0]), "dead"]
    assert len(seen.rows) == 201 and "first 200 of 300" in seen.text
    db.execute("select pgqueue.close_batch(%s)", (batch,))
    db.execute("select pgqueue.cancel_many('q')")
    seen = Found(page.get(f"/batch?id={batch}").text)
    assert "finished" in seen.text and len(seen.rows) == 2
    assert page.get("/batch?id=1000000").status == 404


def test_batches_are_shown_although_their_jobs_take_long_to_count(
    site, db, monkeypatch
) -> None:
    batch = one(db, "select pgqueue.create_batch('after')")
    db.execute("select pgqueue.enqueue('q', batch_id => %s)", (batch,))
    page = site()
    assert Found(page.get("/batches").text).rows[1][4:9] == ["1", *4 * ["0"]]
    for query in ("COUNTS", "BATCH_JOBS"):
        monkeypatch.setattr(pages, query, "select 1 as id from pg_sleep(60)")
    assert Found(page.get("/batches").text).rows[1][4:9] == 5 * ["?"]
    text = page.get(f"/batch?id={batch}").text
    assert "too many to be counted" in text and "not found in a second" in text


def test_the_jobs_of_a_batch_are_found_by_their_ids_however_many_others(db) -> None:
    batch = one(db, "select pgqueue.create_batch('after')")
    for _ in range(20):
        db.execute("select pgqueue.enqueue('q', batch_id => %s)", (batch,))
        db.execute("select nextval('pgqueue.job_id_seq') from generate_series(1, 999)")
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)"
        " select now(), now(), 0, 20, 'q', 'q', '{}' from generate_series(1, 100000) as n"
    )
    # Others, by which the planner guesses how many parts one batch has.
    db.execute(
        "insert into pgqueue.tally (batch_id, part, jobs) select -n, n, 1 from generate_series(1, 20000) as n"
    )
    db.execute("analyze pgqueue.job, pgqueue.tally, pgqueue.batch")
    query = f"select from pgqueue.batch_jobs where batch_id = {batch}"
    (top,) = one(db, f"explain (analyze, buffers, format json) {query}")
    assert top["Plan"]["Actual Rows"] == 20
    assert top["Plan"]["Shared Hit Blocks"] < 1100


def test_a_worker_is_shown_with_a_link_to_its_jobs(site, db) -> None:
    id = one(db, "select pgqueue.enqueue('q')")
    db.execute("select pgqueue.claim('q', 'me & you')")
    page = site()
    links = [a.get("href") for _, a in Found(page.get("/workers").text).tags]
    assert "/jobs?worker=me%20%26%20you" in links
    assert f"/job?id={id}" in page.get("/jobs?worker=me%20%26%20you").text


def test_a_request_of_another_site_does_nothing(site, db) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = site(allow_actions=True)
    form, *_ = Found(page.get("/queue?name=q").text).posts
    for headers in (
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://[", "Host": "localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert page.post(form.action, form.fields, **headers).status == 403, headers
        assert not is_paused(db, "q"), headers
    for mine in {}, {"Origin": "", "Sec-Fetch-Site": "same-origin"}:
        assert page.post(form.action, form.fields, **mine).status == 303


def test_a_form_outlives_the_process_that_showed_it(site, db) -> None:
    db.execute("select pgqueue.enqueue('q')")
    form, *_ = Found(site(allow_actions=True).get("/queue?name=q").text).posts
    assert site(allow_actions=True).post(form.action, form.fields).status == 303
    assert is_paused(db, "q")


@pytest.mark.parametrize("action", ["pause", "cancel", "redrive"])
def test_what_no_form_sends_is_refused(site, db, action) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = site(allow_actions=True)
    for of in (
        *("", "[]", "{}", "7", "[" * 9_000, '["queue"]', '{"id": "x"}'),
        *('{"queue": {}}', '{"queue": ""}'),
        *(r'{"queue": "\ud800"}', r'{"queue": "\u0000"}'),
    ):
        assert page.post(f"/action/{action}", {"of": of}).status == 400, of
    assert page.post("/action/purge", {"of": of}).status == 404
    assert page.post("/action/pause", {"of": "x" * 100_000}).status == 413
    assert not is_paused(db, "q")


def test_a_selection_of_what_is_no_job_is_told_so(site) -> None:
    page = site(allow_actions=True)
    for id in "x", "", "9" * 30:
        answer = page.get(f"/confirm?action=cancel&id={id}")
        assert answer.status == 404 and "job" in answer.text, id


def test_a_number_of_jobs_that_is_none_is_refused(site, db) -> None:
    db.execute("select pgqueue.enqueue('q')")
    kill(db, "q", "boom")
    page = site(allow_actions=True)
    for max_jobs in "", "0", "1e3", "9" * 30, "9" * 9000:
        answer = press(page, "/dead", "Dry run", max_jobs=max_jobs)
        assert answer.status == 400, max_jobs


def test_without_allow_actions_nothing_can_be_done(site, db) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = site()
    assert Found(page.get("/queue?name=q").text).posts == []
    of = json.dumps({"queue": "q"})
    assert page.post("/action/pause", {"of": of}).status == 403
    assert not is_paused(db, "q")


def test_a_reader_sees_the_pages_and_is_refused_the_actions(site, db, role) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = site(user=role, allow_actions=True)
    answer = page.get("/")
    assert answer.status == 403 and "&#39;reader&#39;" in answer.text
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    for path in (*PAGES, "/queue?name=q"):
        answer = page.get(path)
        assert answer.status == 200, path
        assert Found(answer.text).posts == []
    answer = page.post("/action/pause", {"of": json.dumps({"queue": "q"})})
    assert answer.status == 403 and "&#39;operator&#39;" in answer.text
    assert not is_paused(db, "q")


def test_the_settings_of_the_session_change_nothing(site, db) -> None:
    id = one(db, "select pgqueue.enqueue('q')")
    db.execute("select pgqueue.claim('q', 'w')")
    options = (
        "-c datestyle=German -c intervalstyle=sql_standard -c timezone=Asia/Kathmandu"
        " -c search_path=public -c default_transaction_isolation=serializable"
    )
    db.execute("create table public.pg_class (x int)")
    page = site(options=options, allow_actions=True)
    for path in (*PAGES, "/queue?name=q", f"/job?id={id}&log=1"):
        assert page.get(path).status == 200, path
    enqueued = "select enqueued_at at time zone 'UTC' from pgqueue.jobs"
    seen = Found(page.get(f"/job?id={id}").text).text
    assert f"{one(db, enqueued):%Y-%m-%d %H:%M:%S} UTC (" in seen
    assert press(page, "/queue?name=q", "Pause").status == 303


def test_a_database_without_pgqueue_is_told_from_one_that_is_away(site) -> None:
    bare = site(dbname="template1").get("/")
    assert bare.status == 503 and "Install or update pgqueue" in bare.text
    away = site(host="127.0.0.1", port=1).get("/")
    assert away.status == 503 and "Install" not in away.text


@pytest.mark.sample(2)
@pytest.mark.parametrize("table", ["job", "run", "queue", "ticket"])
def test_who_has_locked_a_table_is_named_where_its_page_would_be(
    site, db, connect, table
) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = site(allow_actions=True)
    form = next(f for f in Found(page.get("/queue?name=q").text).posts)
    holder = connect()
    holder.autocommit = False
    holder.execute(f"lock table pgqueue.{table} in access exclusive mode")
    answers = [page.get("/"), page.get("/queue?name=q")]
    if table == "queue":
        answers.append(page.post(form.action, form.fields))
    for answer in answers:
        assert answer.status == 503
        (why,) = re.findall('<p class="why">(.*)</p>', answer.text)
        assert f"session {holder.info.backend_pid} has used it since" in why
        ends = f"<code>select pg_terminate_backend({holder.info.backend_pid})</code>"
        assert ends in answer.text
    holder.rollback()
    assert page.get("/").status == 200


def test_it_says_that_the_server_is_away_and_recovers_by_itself(serve) -> None:
    with Cluster(fast=True) as cluster:
        dsn = f"host={cluster.home} port={cluster.port} user=postgres dbname=postgres"
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create extension pgqueue")
        page = serve(dsn)
        assert page.get("/").status == 200
        cluster.stop()
        answer = page.get("/")
        assert answer.status == 503 and "data-live" in answer.text
        cluster.start()
        assert page.get("/").status == 200


def test_a_standby_shows_every_page_and_offers_no_action(serve) -> None:
    with Cluster(fast=True) as primary:
        with psycopg.connect(where(primary), autocommit=True) as db:
            db.execute("create extension pgqueue")
            id = one(db, "select pgqueue.enqueue('q')")
            kill(db, "q", "boom")
            db.execute("select pgqueue.enqueue('q')")
        with standby_of(primary) as standby:
            page = serve(where(standby), allow_actions=True)
            for path in (*PAGES, "/queue?name=q", f"/job?id={id}&payload=1&log=1"):
                answer = page.get(path)
                assert answer.status == 200, path
                assert Found(answer.text).posts == []
            answer = page.post("/action/pause", {"of": json.dumps({"queue": "q"})})
            assert answer.status == 503 and "A standby is read-only" in answer.text


def test_it_works_behind_a_pooler_and_leaves_no_setting_there(
    serve, db, pooler
) -> None:
    id = one(db, "select pgqueue.enqueue('q')")
    kill(db, "q", "boom")
    db.execute("select pgqueue.enqueue('q')")
    page = serve(pooler, allow_actions=True)
    for path in (*PAGES, "/queue?name=q", f"/job?id={id}&payload=1&log=1") * 2:
        assert page.get(path).status == 200, path
    assert press(page, "/queue?name=q", "Pause").status == 303
    assert is_paused(db, "q")
    with psycopg.connect(pooler) as next_client:
        assert one(next_client, "show statement_timeout") == "0"


def test_no_page_keeps_a_transaction_open(dsn) -> None:
    def look(reading: Reading) -> Page:
        query = "select name, setting from pg_settings where name ~ %(what)s"
        found = reading.rows(query, what="statement_timeout|^idle_in_tran|_read_only$")
        return Page("", {row["name"]: row["setting"] for row in found})

    shown = read(dsn, look, {}).context
    assert shown["transaction_read_only"] == "on"
    assert shown["statement_timeout"] == "5000"
    assert shown["idle_in_transaction_session_timeout"] == "5000"


def test_it_can_be_mounted_as_the_readme_does_it(serve, dsn, db, monkeypatch) -> None:
    db.execute("select pgqueue.enqueue('q')")
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    web: dict[str, Any] = {}
    exec(blocks("The dashboard")[0], web)
    page = serve(web["app"])
    page.name = "ops.example"
    answer = press(page, "/jobs/queue?name=q", "Pause")
    assert answer.headers["Location"] == "/jobs/queue?name=q"
    assert is_paused(db, "q")


def test_every_link_leads_somewhere_below_a_prefix_that_a_proxy_takes_away(
    serve, dsn, db
) -> None:
    for name in "q", NASTY[:120], "ä/../?&#%00", " ":
        db.execute("select pgqueue.enqueue(%s) from generate_series(1, 3)", (name,))
        kill(db, name, f"{NASTY} of {name}", jobs=1)
        db.execute("select pgqueue.claim(%s, 'w')", (name,))
    db.execute("select pgqueue.schedule('s', 'q', every => '1 h')")
    db.execute("select pgqueue.create_batch('q')")
    mounted = Starlette(routes=[Mount("/ops/queue", app(dsn, allow_actions=True))])

    async def as_uvicorn_with_root_path(scope, receive, send) -> None:
        if scope["type"] == "http":
            scope |= {"root_path": "/api", "path": "/api" + scope["path"]}
        await mounted(scope, receive, send)

    page = serve(as_uvicorn_with_root_path)
    found, left = set(), ["/api/ops/queue/"]
    while left:
        link = left.pop()
        answer = page.get(link.removeprefix("/api"))
        assert answer.status == 200, link
        for tag, given in Found(answer.text).tags:
            link = given.get("href") or given.get("src") or given.get("action")
            if link == "#main":
                continue
            assert link is None or link.startswith("/api/ops/queue/"), link
            if tag in ("a", "link", "script") and link not in found:
                found.add(link)
                left.append(link)
    assert {link.split("?")[0].split("/")[-1] for link in found} >= {
        *("", "queue", "job", "running", "dead", "schedules", "batches"),
        *("dashboard.css", "dashboard.js"),
    }
    form, *_ = Found(page.get("/ops/queue/queue?name=q").text).posts
    answer = page.post(form.action.removeprefix("/api"), form.fields)
    assert answer.headers["Location"] == "/api/ops/queue/queue?name=q"
    assert is_paused(db, "q")


def test_the_readme_has_the_options_of_the_command(run) -> None:
    _, command = blocks("The dashboard", "sh")[0].splitlines()
    shown = run(*command.split()[2:], "--help").stdout
    text = documents.sections("docs/dashboard.md")[""]
    rows = documents.table(text, "option")
    named = {word for row in rows for word in re.findall(r"--[a-z-]+", row[0])}
    assert named == set(re.findall(r"--[a-z-]+", shown)) - {"--help"}


def test_its_sessions_are_not_taken_for_workers(site, db) -> None:
    page = site()
    assert page.get("/running").status == 200
    assert "No job runs" in page.get("/running").text
    assert "<h2>Workers" not in page.get("/running").text


@pytest.mark.parametrize("more", [[], ["--json"], ["--no-secret"]])
def test_the_command_serves_until_ctrl_c(dsn, free_port, more) -> None:
    command = [sys.executable, "-m", "pgqueue", "dashboard", "--port", str(free_port)]
    env = {**os.environ, "PGQUEUE_DSN": dsn}
    with subprocess.Popen(
        [*command, *more],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            if more == ["--json"]:
                told = json.loads(child.stdout.readline())["url"]
            else:
                told = child.stderr.readline().split()[-1]
            url, _, secret = told.partition("?secret=")
            assert url == f"http://127.0.0.1:{free_port}/"
            assert (len(secret) >= 20) == (more != ["--no-secret"])
            page = Site.wait_for(free_port)
            cookie = {}
            if secret:
                assert page.get("/").status == 403
                let_in = page.get(f"/?secret={secret}")
                assert (let_in.status, let_in.headers["Location"]) == (303, "/")
                cookie = {"Cookie": let_in.headers["Set-Cookie"].split(";")[0]}
            answer = page.get("/", **cookie)
            assert answer.status == 200 and 'method="post"' not in answer.text
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 130
            assert "Traceback" not in child.stderr.read()
        finally:
            child.kill()


def test_the_address_that_the_command_prints_has_any_secret(dsn, free_port) -> None:
    command = [sys.executable, "-m", "pgqueue", "dashboard", "--port", str(free_port)]
    env = {
        **os.environ,
        "PGQUEUE_DSN": dsn,
        "PGQUEUE_DASHBOARD_SECRET": "a+b/c=&d#e %41é",
    }
    with subprocess.Popen(
        [*command, "--json"], env=env, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            url = json.loads(child.stdout.readline())["url"]
            page = Site.wait_for(free_port)
            assert page.get(url.partition(str(free_port))[2]).status == 303
        finally:
            child.kill()


def test_an_address_that_is_taken_is_none_where_the_page_is(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("pgqueue", "dashboard", "--port", port, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "address already in use" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "jobs.example"])
def test_actions_for_the_world_without_a_secret_are_refused(run, host) -> None:
    options = ["--host", host, "--allow-actions", "--no-secret"]
    done = run("pgqueue", "dashboard", *options)
    assert done.returncode == 2 and "could act" in done.stderr


def test_a_secret_opens_one_browser_and_no_other(site, dsn, db, serve) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = serve(dsn, allow_actions=True, secret="it's one")
    of = {"of": json.dumps({"queue": "q"})}
    for path in ("/", "/static/dashboard.css", "/?secret=", "/?secret=it", "/nowhere"):
        assert page.get(path).status == 403
    assert page.post("/action/pause", of).status == 403
    assert page.post("/action/pause?secret=it's%20one", of).status == 303
    assert not is_paused(db, "q")
    let_in = page.get("/queue?secret=it's%20one&name=q")
    assert let_in.headers["Location"] == "/queue?name=q"
    cookie, *how = let_in.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax"} <= set(how) and "one" not in cookie
    assert page.get("/queue?name=q", Cookie=cookie).status == 200
    assert page.get("/", Cookie=cookie[:-1] + "ä").status == 403
    assert page.post("/action/pause", of, Cookie=cookie).status == 303
    assert is_paused(db, "q")
    assert page.post("/action/pause", of, Cookie=cookie, Origin="null").status == 403
    # Another one, though ports share their cookies.
    other = serve(dsn, secret="another")
    assert other.get("/", Cookie=cookie).status == 403


def test_the_command_says_what_to_install(run, tmp_path) -> None:
    (tmp_path / "starlette.py").write_text("raise ImportError('none here')")
    done = run("pgqueue", "dashboard")
    assert done.returncode == 1
    assert "pgqueue-postgres[dashboard]" in done.stderr
    assert "Traceback" not in done.stderr
