"""The dashboard in a real browser: no script of others runs, and what is live stays usable."""

import json
import shutil

import psycopg
import pytest
from cluster import Cluster
from dashboard_site import PAGES, kill

pytest_plugins = ["dashboard_site"]

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs Chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")

# It may look for nothing outside.
OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run"
OPTIONS += " --disable-background-networking --disable-component-update --disable-sync"
NASTY = "</code><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;\u202e"
LONG = "ä" * 50 + "x" * 98  # a digit more, and no name could be longer
# Errors of which a part cannot be seen.
CUT = """[...document.querySelectorAll("td:has(code)")]
    .filter(td => td.scrollWidth > td.clientWidth).map(td => td.textContent)"""


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=OPTIONS.split())
        yield browser
        browser.close()


@pytest.fixture
def look(chromium):
    """Open a page; at the end nothing has been said in its console, by no script and no policy."""
    said: list[str] = []
    contexts = []

    def look(site, path="/", is_quiet=True, **options):
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on(
            "dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss())
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        if is_quiet:
            page.on("console", lambda message: said.append(message.text))
        page.goto(f"http://{site.host}{path}")
        return page

    yield look
    for context in contexts:
        context.close()
    assert said == []


def hostile(db: psycopg.Connection) -> None:
    """Put a script into every text, and a very long word into some."""
    for text in (NASTY, LONG):
        db.execute(
            "select pgqueue.enqueue(%(t)s, to_jsonb(%(t)s::text), kind => %(t)s,"
            " group_key => %(t)s, headers => %(h)s) from generate_series(1, 3)",
            {"t": text, "h": json.dumps({"x": text})},
        )
        kill(db, text, text * 10 + "\n" + text, jobs=1)
        kill(db, text, text[:100], jobs=1)
        id, token = db.execute(
            "select id, token from pgqueue.claim(%s, %s)", (text, text)
        ).fetchone()
        db.execute("select pgqueue.progress(%s, %s, 1, 2, %s)", (id, token, text))
        db.execute("select pgqueue.schedule(%(t)s, %(t)s, every => '1 h')", {"t": text})
        db.execute("select pgqueue.create_batch(%s)", (text,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_script_of_others_runs_and_a_phone_scrolls_only_down(
    site, db, look, scheme
) -> None:
    hostile(db)
    served = site(allow_actions=True)
    page = look(served, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    links = page.eval_on_selector_all("main a", "all => all.map(a => a.href)")
    jobs = [row[0] for row in db.execute("select id from pgqueue.jobs")]
    paths = [f"http://{served.host}{path}" for path in PAGES]
    paths += [f"{paths[0]}job?id={id}&payload=1&log=1" for id in jobs]
    for url in dict.fromkeys([*links, *paths]):
        page.goto(url)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, url
        assert page.evaluate(CUT) == [], url


def test_what_health_says_leaves_room_for_the_queues_on_a_phone(site, db, look) -> None:
    db.execute(
        "select pgqueue.enqueue(%s || n, run_at => now() - interval '1 hour')"
        " from generate_series(1, 60) as n",
        (LONG,),
    )
    page = look(site(), viewport={"width": 390, "height": 800})
    assert page.locator("th:has-text('Queue')").bounding_box()["y"] < 400
    assert not page.is_visible("li >> nth=0")
    page.focus("summary >> nth=1")
    page.keyboard.press("Enter")
    assert page.locator("li:visible").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_page_changes_under_its_reader_who_keeps_his_place(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q' || n) from generate_series(1, 200) as n")
    page = look(site(), viewport={"width": 1000, "height": 500})
    page.focus("text=q150")
    page.evaluate("scrollTo(0, 2500)")
    db.execute("select pgqueue.enqueue('a new one')")
    page.wait_for_selector("text=a new one", state="attached")
    assert page.evaluate("document.activeElement.textContent") == "q150"
    assert page.evaluate("scrollY") >= 2400


def test_the_focus_stays_on_a_row_that_moves(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q' || n) from generate_series(1, 5) as n")
    db.execute("select pgqueue.enqueue('q1')")
    page = look(site(), "/?order=ready")
    page.focus("text=q5")
    db.execute("select pgqueue.enqueue('q5') from generate_series(1, 5)")
    page.wait_for_selector("tbody tr:first-child:has-text('q5')")
    assert page.evaluate("document.activeElement.textContent") == "q5"


def test_what_is_unfolded_stays_unfolded(site, db, look) -> None:
    id = db.execute("select pgqueue.enqueue('q')").fetchone()[0]
    db.execute(
        "select pgqueue.fail(id, token, %s, '1 h') from pgqueue.claim('q', 'w')",
        ("ValueError\ndeep below",),
    )
    page = look(site(), f"/job?id={id}")
    page.click("summary")
    db.execute("select pgqueue.reprioritize(%s, 77)", (id,))
    page.wait_for_selector("dd:has-text('77')")
    assert page.is_visible("text=deep below")


def test_an_error_stays_unfolded_when_another_overtakes_it(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 3)")
    kill(db, "q", "Seldom" + " a" * 100, jobs=1)
    page = look(site(), "/dead")
    page.click("summary")
    kill(db, "q", "Often" + " b" * 100)
    page.wait_for_selector("text=Often")
    assert page.locator("summary").all_text_contents()[0].startswith("Often")
    assert page.locator("pre:visible").text_content().startswith("Seldom")


def test_the_keyboard_is_enough_to_pause_a_queue(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = look(site(allow_actions=True))

    def tab_to(text: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent.trim()") == text:
                return
        raise AssertionError(f"the keyboard does not reach {text}")

    tab_to("q")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue?name=q")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    tab_to("Pause")
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector("button:has-text('Resume')")
    query = "select paused from pgqueue.queues where queue = 'q'"
    assert db.execute(query).fetchone() == (True,)


def test_redrive_in_a_browser_sends_back_what_the_dry_run_showed(
    site, db, look
) -> None:
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 5)")
    kill(db, "q", 'it\'s "broken" \\ 100 % <b>\n')
    page = look(site(allow_actions=True), "/dead")
    page.click("text=Dry run")
    page.wait_for_selector("text=5 jobs would be redriven")
    page.click("button:has-text('Redrive')")
    page.wait_for_selector("text=5 jobs redriven")
    assert db.execute("select count(*) from pgqueue.dead_job").fetchone() == (0,)


def test_a_selection_is_made_confirmed_and_done_once(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 3)")
    kill(db, "q", "boom")
    page = look(site(allow_actions=True), "/jobs?state=dead")
    page.check("text=all on this page")
    page.uncheck("td [name=id] >> nth=0")
    page.click("button:has-text('Retry')")
    page.wait_for_selector("text=2 jobs would be redriven")
    page.click("button:has-text('Retry 2 jobs')")
    page.wait_for_selector("#said:has-text('2 jobs redriven')")
    assert page.url.endswith("/jobs?state=dead")
    left = db.execute("select count(*) from pgqueue.job").fetchone()
    db.execute(
        "select pgqueue.fail(id, token, 'boom', permanent => true) from pgqueue.claim('q', 'w', 9)"
    )
    page.reload()
    assert left == (2,) and page.locator("#said").count() == 0
    assert db.execute("select count(*) from pgqueue.job").fetchone() == (0,)


def test_what_was_said_stays_while_the_page_refreshes(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = look(site(allow_actions=True), "/queue?name=q")
    page.click("button:has-text('Pause')")
    page.wait_for_selector("#said:has-text('Paused: queue q')")
    db.execute("select pgqueue.enqueue('q', kind => 'new')")
    page.wait_for_selector("td:has-text('new')", state="attached")
    assert page.is_visible("#said")


def test_a_typed_name_and_the_focus_survive_a_refresh(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = look(site(allow_actions=True), "/queue?name=q")
    page.click("summary:has-text('by its name')")
    page.fill("[name=group_key]", "acme")
    db.execute("select pgqueue.enqueue('q', kind => 'new')")
    page.wait_for_selector("td:has-text('new')", state="attached")
    assert page.input_value("[name=group_key]") == "acme"
    page.keyboard.press("Enter")
    page.wait_for_selector("#said:has-text('Paused: group acme of queue q')")


def test_no_other_page_may_frame_it_or_post_to_it(site, db, look, serve) -> None:
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    db.execute("select pgqueue.enqueue('q')")
    served = site(allow_actions=True)
    of = json.dumps({"queue": "q"})
    form = (
        f'<iframe src="http://{served.host}/queue?name=q"></iframe>'
        f'<form method="post" action="http://{served.host}/action/pause">'
        f"<input name='of' value='{of}'><button>Win</button></form>"
    )
    other = serve(Starlette(routes=[Route("/", lambda request: HTMLResponse(form))]))
    page = look(other, is_quiet=False)
    framed = [frame.content() for frame in page.frames[1:]]
    assert len(framed) == 1 and "/action/pause" not in framed[0]
    page.click("text=Win")
    page.wait_for_selector("text=did not come from a page of this dashboard")
    query = "select paused from pgqueue.queues where queue = 'q'"
    assert db.execute(query).fetchone() == (False,)


def test_it_shows_what_it_last_saw_while_the_server_restarts(serve, look) -> None:
    with Cluster(fast=True) as cluster:
        dsn = f"host={cluster.home} port={cluster.port} user=postgres dbname=postgres"
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create extension pgqueue")
            conn.execute("select pgqueue.enqueue('before')")
        page = look(serve(dsn), is_quiet=False)
        cluster.stop()
        page.wait_for_selector("text=No news since")
        assert page.is_visible("text=before")
        cluster.start()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select pgqueue.enqueue('after')")
        page.wait_for_selector("text=after")
        page.wait_for_selector("text=No news since", state="hidden")


def test_without_scripts_it_is_a_plain_page(site, db, look) -> None:
    db.execute("select pgqueue.enqueue('q')")
    page = look(site(allow_actions=True), java_script_enabled=False)
    page.click("a:text-is('q')")
    page.click("button:has-text('Pause')")
    page.wait_for_selector("button:has-text('Resume')")
