"""metrics() as Prometheus reads it, and what sql/monitoring/ has for Prometheus and Grafana."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import documents
import psycopg
import pytest
import yaml
from conftest import Connect, column, one
from documents import REPO
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from psycopg.rows import dict_row

pytest_plugins = ["command_line"]

MONITORING = REPO / "sql/monitoring"
COLLECTOR = yaml.safe_load((MONITORING / "sql_exporter.collector.yml").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())

COUNTERS = ("enqueued", "completed", "failed", "dead")

Samples = dict[tuple[str, frozenset], float]

HOSTILE = 'a "b"\\n\n{c="d"} 1 \tÜ\x1b[31m#'
# Something of everything: each panel shows a row, and each metric has a sample.
FILL = """
select pgqueue.enqueue(%(queue)s, run_at => now() - n * interval '1 minute') from generate_series(1, 30) as n;
select pgqueue.enqueue(%(queue)s, run_at => now() + interval '1 day');
select pgqueue.complete(c.id, c.token) from pgqueue.claim(%(queue)s, 'w 1', 5) as c;
select pgqueue.fail(c.id, c.token, E'KeyError: 7\\nat', '1 hour') from pgqueue.claim(%(queue)s, 'w 2', 3) as c;
select pgqueue.fail(c.id, c.token, 'e', permanent => true) from pgqueue.claim(%(queue)s, 'w 2', 2) as c;
select pgqueue.progress(c.id, c.token, 1, 4, 'step') from pgqueue.claim(%(queue)s, 'w 3', 2, '1 hour') as c;
select count(*) from pgqueue.claim(%(queue)s, 'w 4', 1);
update pgqueue.job set lease_expires_at = now() - interval '5 minutes' where worker = 'w 4';
select pgqueue.schedule(%(queue)s, %(queue)s, every => '1 hour');
select pgqueue.schedule('spread', 'other', every => '1 hour', jitter => '1 hour');
update pgqueue.schedule set next_slot = now() - interval '10 minutes';
select pgqueue.schedule('at rest', 'seldom', every => '1 hour');
select pgqueue.pause_schedule('at rest');
select pgqueue.pause('other');
select pgqueue.pause('other', 'k');
select pgqueue.pause('other', group_key => 'g');
select pgqueue.enqueue('other', unique_key => 'k', unique_for => '1 hour')
"""


@pytest.fixture
def filled(db: psycopg.Connection) -> psycopg.Connection:
    psycopg.ClientCursor(db).execute(FILL, {"queue": HOSTILE})
    # As if maintain had counted.
    db.execute(
        "insert into pgqueue.counter values (%s, now(), 32, 5, 3, 2)", (HOSTILE,)
    )
    db.execute("analyze")
    return db


@pytest.fixture
def reader(filled, connect: Connect, role) -> Iterator[psycopg.Connection]:
    """A session of a role that monitors, and may do nothing else."""
    filled.execute("select pgqueue.grant_access(%s, 'reader')", (role,))
    with connect(user=role) as session:
        yield session


def name_of(family: Metric) -> str:
    """Its name in the text; the client cuts the end off that of a counter."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def samples(found: list[Metric]) -> Samples:
    every = [sample for family in found for sample in family.samples]
    by_labels = {(s.name, frozenset(s.labels.items())): s.value for s in every}
    assert len(by_labels) == len(every)
    return by_labels


def rows(db: psycopg.Connection, query: str) -> list[dict[str, Any]]:
    return db.cursor(row_factory=dict_row).execute(query).fetchall()


def differences(some: Samples, others: Samples) -> list:
    """What differs; what the clock moves may by some seconds."""
    found: list = list(some.keys() ^ others.keys())
    for key in some.keys() & others.keys():
        is_moving = key[0].endswith(("_wait_seconds", "_late_seconds")) and some[key]
        if others[key] != pytest.approx(some[key], abs=5 if is_moving else 1e-6):
            found.append((key, some[key], others[key]))
    return found


def shown(db: psycopg.Connection) -> Samples:
    """What the views say, by the rule that names follow columns and end in their unit."""
    found: Samples = {}

    def add(name: str, value: Any, **labels: str) -> None:
        if isinstance(value, timedelta):
            name, value = f"{name}_seconds", value.total_seconds()
        if value is not None:
            found[f"pgqueue_{name}", frozenset(labels.items())] = float(value)

    states = ("ready", "scheduled", "running", "expired", "blocked")
    for row in rows(db, "select * from pgqueue.queues"):
        queue = row.pop("queue")
        for name, value in row.items():
            if name in states:
                add("jobs", value, queue=queue, state=name)
            elif re.fullmatch(r"rate_\d+.", name):
                add(f"{name}_per_second", value, queue=queue)
            elif name.startswith("failure_rate_"):
                add(f"{name}_ratio", value, queue=queue)
            else:
                add("dead_jobs" if name == "dead" else name, value, queue=queue)
    for row in rows(db, "select *, clock_timestamp() as now from pgqueue.schedules"):
        if not row["paused"]:
            late = row["now"] - row["next_slot"] - (row["jitter"] or timedelta())
            labels = {"queue": row["queue"], "schedule": row["name"]}
            add("schedule_late", max(late, timedelta()), **labels)
    for row in rows(db, "select * from pgqueue.retention"):
        add("retention_rows", row["rows"], what=row["what"])
        add("retention_bytes", row["bytes"], what=row["what"])
    for row in rows(db, "select * from pgqueue.counter"):
        for name in COUNTERS:
            add(f"{name}_total", row[name], queue=row["queue"])
    add("info", 1, version=one(db, "select pgqueue.version()"))
    return found


def test_every_number_of_the_views_is_read_by_a_client_of_prometheus(filled):
    found = families(one(filled, "select pgqueue.metrics(by_queue => true)"))
    assert differences(samples(found), shown(filled)) == []
    assert all(family.documentation for family in found)
    counters = {f"pgqueue_{name}_total" for name in COUNTERS}
    assert {name_of(f) for f in found if f.type == "counter"} == counters
    assert {f.type for f in found} == {"gauge", "counter"}
    assert len({family.name for family in found}) == len(found)


def test_by_default_gauges_are_of_all_queues_and_a_queue_takes_200_bytes(filled):
    text = one(filled, "select pgqueue.metrics()")
    found, each = samples(families(text)), shown(filled)
    for name, total in ("jobs", sum), ("dead_jobs", sum), ("oldest_wait_seconds", max):
        values = {}
        for (metric, labels), value in each.items():
            if metric == f"pgqueue_{name}":
                rest = frozenset(kv for kv in labels if kv[0] == "state")
                values.setdefault(rest, []).append(value)
        for labels, listed in values.items():
            value = found[f"pgqueue_{name}", labels]
            assert value == pytest.approx(total(listed), abs=5)
    by_queue = {name for name, labels in found if "queue" in dict(labels)}
    assert by_queue == {f"pgqueue_{name}_total" for name in COUNTERS}
    filled.execute("truncate pgqueue.job, pgqueue.dead_job, pgqueue.counter")
    filled.execute("select pgqueue.unschedule(name) from pgqueue.schedules")
    before = len(one(filled, "select pgqueue.metrics()"))
    filled.execute(
        "select pgqueue.enqueue('queue ' || n, run_at => now() - n * interval '1 s'),"
        " pgqueue.schedule('s' || n, 'queue ' || n, every => '1 hour')"
        " from generate_series(1, 1008) as n"
    )
    filled.execute(
        "insert into pgqueue.counter"
        " select 'queue ' || n, now(), 999999, 999999, 999999, 999999"
        " from generate_series(1, 1008) as n"
    )
    assert len(one(filled, "select pgqueue.metrics()")) - before < 200 * 1008


# Counters


def pass_time(db: psycopg.Connection) -> None:
    """Let 40 seconds pass, and maintain() count."""
    db.execute("update pgqueue.cut set at = at - interval '40 s'")
    db.execute("update pgqueue.run set finished_at = finished_at - interval '40 s'")
    db.execute("select pgqueue.maintain()")


def counted(db: psycopg.Connection) -> dict[str, tuple]:
    query = "select queue, enqueued, completed, failed, dead from pgqueue.counter"
    return {queue: tuple(numbers) for queue, *numbers in db.execute(query)}


def end(db: psycopg.Connection, verb: str, jobs: int, queue: str = "q") -> None:
    call = {
        "complete": "pgqueue.complete(id, token)",
        "fail": "pgqueue.fail(id, token, 'e', '1 day')",
        "kill": "pgqueue.fail(id, token, 'e', permanent => true)",
    }[verb]
    db.execute(f"select {call} from pgqueue.claim(%s, 'w', %s)", (queue, jobs))


def test_each_job_and_end_is_counted_once(db):
    db.execute("select pgqueue.enqueue('before')")
    db.execute("select pgqueue.maintain()")
    assert counted(db) == {}
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 12)")
    db.execute("select pgqueue.enqueue('other', run_at => now() + interval '1 day')")
    for verb, jobs in ("complete", 4), ("fail", 2), ("kill", 1):
        end(db, verb, jobs)
    db.execute("select pgqueue.cancel(max(id)) from pgqueue.job where queue = 'q'")
    for _ in range(2):
        pass_time(db)
    assert counted(db) == {"q": (12, 4, 3, 1), "other": (1, 0, 0, 0)}
    end(db, "complete", 3)
    for _ in range(4):
        pass_time(db)
    assert counted(db) == {"q": (12, 7, 3, 1), "other": (1, 0, 0, 0)}
    assert one(db, "select count(*) from pgqueue.cut") == 2


def test_what_leaves_no_run_is_counted_only_while_it_is_there(db):
    db.execute("select pgqueue.maintain()")
    db.execute("select pgqueue.configure('q', keep_runs => 0)")
    db.execute("select pgqueue.enqueue(q) from unnest('{q,q,q,p}'::text[]) as q")
    end(db, "complete", 1)
    db.execute("select pgqueue.purge('p')")
    for _ in range(3):
        pass_time(db)
    assert counted(db) == {"q": (2, 0, 0, 0)}


def test_what_commits_late_is_counted_when_it_has(db, connect: Connect):
    db.execute("select pgqueue.maintain()")
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 3)")
    late = connect(autocommit=False)
    end(late, "complete", 1)
    late.execute("select pgqueue.enqueue('late')")
    for _ in range(3):
        pass_time(db)
    assert counted(db) == {}
    late.commit()
    for _ in range(2):
        pass_time(db)
    assert counted(db) == {"q": (3, 1, 0, 0), "late": (1, 0, 0, 0)}


def test_a_transaction_that_stays_open_holds_up_counting_for_five_minutes(
    db, connect: Connect
):
    db.execute("select pgqueue.maintain()")
    connect(autocommit=False).execute("select pg_current_xact_id()")
    db.execute("select pgqueue.enqueue('q')")
    for _ in range(7):
        pass_time(db)
    assert counted(db) == {}
    for _ in range(2):
        pass_time(db)
    assert counted(db) == {"q": (1, 0, 0, 0)}


def test_only_one_session_counts_and_none_waits(db, connect: Connect):
    db.execute("select pgqueue.maintain()")
    db.execute("select pgqueue.enqueue('q')")
    pass_time(db)
    first = connect(autocommit=False)
    pass_time(first)
    db.execute("set lock_timeout = '1 s'")
    db.execute("select pgqueue.maintain()")
    assert counted(db) == {}
    first.commit()
    assert counted(db) == {"q": (1, 0, 0, 0)}


def test_counting_goes_on_when_the_clock_has_been_set_back(db):
    db.execute("select pgqueue.maintain()")
    db.execute("update pgqueue.cut set at = now() + interval '1 day'")
    db.execute("select pgqueue.maintain()")
    db.execute("select pgqueue.enqueue('q')")
    for _ in range(2):
        pass_time(db)
    assert counted(db) == {"q": (1, 0, 0, 0)}


def test_an_idle_queue_is_forgotten(db):
    db.execute(
        "insert into pgqueue.counter values ('q', now() - interval '15 days', 1, 1, 1, 1)"
    )
    db.execute("select pgqueue.maintain()")
    for _ in range(2):
        pass_time(db)
    assert counted(db) == {}


def test_a_locked_table_keeps_no_session_waiting_for_metrics(db, connect: Connect):
    db.execute("set statement_timeout = '20 s'")
    with connect(autocommit=False) as other:
        other.execute("lock table pgqueue.job")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            db.execute("select pgqueue.metrics()")
    assert one(db, "select pgqueue.metrics()")


def test_a_reader_gets_the_same_samples_by_sql_exporter(reader):
    queries = {query["query_name"]: query["query"] for query in COLLECTOR["queries"]}
    answers = {name: rows(reader, query) for name, query in queries.items()}
    found: Samples = {}
    for metric in COLLECTOR["metrics"]:
        for row in answers[metric["query_ref"]]:
            labels = {label: row[label] for label in metric["key_labels"]}
            assert all(isinstance(value, str) for value in labels.values())
            values = {"": metric["static_value"]} if "static_value" in metric else {}
            for name in metric.get("values", []):
                values[name] = row[name]
            for name, value in values.items():
                more = {metric["value_label"]: name} if "value_label" in metric else {}
                assert more or len(values) == 1
                assert not isinstance(value, bool | timedelta), name
                if value is not None:  # of a null sql_exporter makes no sample
                    key = metric["metric_name"], frozenset((labels | more).items())
                    found[key] = float(value)
    want = families(one(reader, "select pgqueue.metrics(by_queue => true)"))
    assert differences(found, samples(want)) == []
    about = {
        m["metric_name"]: (m["help"].strip(), m["type"]) for m in COLLECTOR["metrics"]
    }
    assert about == {name_of(m): (m.documentation, m.type) for m in want}


def test_what_sql_exporter_cannot_read_of_a_locked_table_is_missed(reader, connect):
    (rule,) = (rule for rule in RULES if rule["alert"] == "PgqueueNotMeasured")
    (missed,) = re.findall(r"absent\((\w+)\)", rule["expr"])
    (metric,) = (m for m in COLLECTOR["metrics"] if m["metric_name"] == missed)
    (query,) = (
        q["query"]
        for q in COLLECTOR["queries"]
        if q["query_name"] == metric["query_ref"]
    )
    assert rows(reader, query)
    reader.execute("set lock_timeout = '1 s'")
    connect(autocommit=False).execute("lock table pgqueue.job")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        rows(reader, query)


def test_the_reference_has_every_metric_with_its_labels(filled):
    section = documents.sections("docs/reference/health.md")["Metrics"]
    told = {
        name: set(documents.quoted(labels))
        for names, labels, _ in documents.table(section, "metric", "labels")
        for name in documents.quoted(names)
    }
    found = families(one(filled, "select pgqueue.metrics(by_queue => true)"))
    assert told == {name_of(family): set(family.samples[0].labels) for family in found}


def test_the_command_prints_utf8_whatever_the_terminal_has(run, filled):
    done = run("pgqueue", "metrics", "--by-queue", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert differences(samples(families(done.stdout)), shown(filled)) == []


def test_alerts_ask_for_metrics_and_labels_that_are_there(filled):
    found = {
        name_of(f): f
        for f in families(one(filled, "select pgqueue.metrics(by_queue => true)"))
    }
    named = "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
    named += " union select viewname from pg_views where schemaname = 'pgqueue'"
    objects = set(column(filled, named))
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 5
    for rule in RULES:
        asked = set(re.findall(r"\bpgqueue_\w+", rule["expr"]))
        assert asked and asked <= found.keys(), rule
        for metric, label, value in re.findall(r'(\w+)\{(\w+)="(\w+)"\}', rule["expr"]):
            values = {sample.labels[label] for sample in found[metric].samples}
            assert value in values, rule
        summary, description = (
            rule["annotations"][key] for key in ("summary", "description")
        )
        labels = set.intersection(*(set(found[m].samples[0].labels) for m in asked))
        assert set(re.findall(r"\$labels\.(\w+)", summary + description)) <= labels
        assert set(re.findall(r"\bpgqueue\.(\w+)", description)) <= objects, rule
        assert rule["labels"]["severity"] in ("warning", "critical")


QUIET = {
    "retention_bytes": "8192x240",
    "dead_jobs": "50x240",
    "dead_total": "90x240",
    "is_estimate": "0x240",
    "paused": "0x240",
    "pauses": "0x240",
    "workers": "1x240",
    "parked": "0x240",
    "jobs{state='ready'}": "5x240",
    "p99_wait_seconds": "2x240",
    "oldest_wait_seconds": "2x240",
}
WAITS = {"p99_wait_seconds": "600x240", "oldest_wait_seconds": "4000x240"}
ALARMS = [
    ({}, set()),
    (WAITS, {"JobsWait", "JobForgotten"}),
    (WAITS | {"paused": "1x240", "workers": "0x240"}, set()),
    ({"paused": "1x240", "oldest_wait_seconds": "90000x240"}, {"JobForgotten"}),
    # What waits may be of a paused kind.
    (WAITS | {"pauses": "1x240"}, set()),
    (
        WAITS | {"pauses": "1x240", "p99_wait_last_hour_seconds": "600x240"},
        {"JobsWait", "JobsWaited"},
    ),
    ({"pauses": "1x240", "oldest_wait_seconds": "90000x240"}, {"JobForgotten"}),
    ({"workers": "0x240"}, {"NoWorker"}),
    # From the 230th minute on: 20 more; a few more of many; redriven, and dead again.
    ({"dead_jobs": "50x229 70x10"}, {"DeadJobsGrow"}),
    ({"is_estimate": "1x240", "dead_total": "90x229 93x10"}, {"DeadJobsGrow"}),
    ({"is_estimate": "1x240", "dead_jobs": "50x229 52x10"}, set()),
    (
        {"dead_jobs": "50x200 0x28 50x10", "dead_total": "90x229 140x10"},
        {"DeadJobsGrow"},
    ),
    # A queue that was not there before.
    ({"dead_jobs": "_x229 70x10", "dead_total": "_x229 70x10"}, {"DeadJobsGrow"}),
    ({"retention_bytes": "_x240"}, {"NotMeasured"}),
]


@pytest.mark.skipif(not shutil.which("promtool"), reason="it needs promtool")
@pytest.mark.parametrize(("series", "alarms"), ALARMS)
def test_an_alert_is_raised_for_what_it_is_about_and_for_nothing_else(
    series, alarms, tmp_path
):
    given = [
        {"series": f"pgqueue_{name}", "values": values}
        for name, values in (QUIET | series).items()
    ]
    asked = [
        {
            "expr": f"count({rule['expr']})",
            "eval_time": "239m",
            "exp_samples": [{"value": 1}] if rule["alert"][7:] in alarms else [],
        }
        for rule in RULES
    ]
    case = {"interval": "1m", "input_series": given, "promql_expr_test": asked}
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [], "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def ask(db: psycopg.Connection, query: str, queues: list[str]) -> psycopg.Cursor:
    """Run a query as Grafana does, with these queues chosen."""
    literals = ",".join("'" + queue.replace("'", "''") + "'" for queue in queues)
    query = query.replace("${queue:sqlstring}", literals)
    now = datetime.now(UTC)
    for macro, moment in (
        ("$__timeFrom()", now - timedelta(hours=1)),
        ("$__timeTo()", now),
    ):
        query = query.replace(macro, f"'{moment:%Y-%m-%dT%H:%M:%SZ}'")
    assert "$" not in query
    return psycopg.ClientCursor(db).execute(query)


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_of_the_dashboard_shows_what_a_reader_may_see(reader, panel):
    (target,) = panel["targets"]
    answer = ask(reader, target["rawSql"], [HOSTILE, "it's"])
    names, found = [c.name for c in answer.description or ()], answer.fetchall()
    assert found and len(set(names)) == len(names)
    named = [rule["matcher"]["options"] for rule in panel["fieldConfig"]["overrides"]]
    field = panel.get("options", {}).get("reduceOptions", {}).get("fields")
    assert {*named, *([field] if field else [])} <= set(names)
    if target["format"] == "time_series":
        assert names[:2] == ["time", "metric"] and len(names) > 2
        assert [row[0] for row in found] == sorted(row[0] for row in found)
    cells = [cell for row in found for cell in row]
    assert not any(isinstance(cell, timedelta | list) for cell in cells)
    assert "queue" not in names or {r[names.index("queue")] for r in found} == {HOSTILE}
    ask(reader, target["rawSql"], [])  # of a database without queues


def test_the_dashboard_asks_for_its_data_source_and_queues(reader):
    source, queue = DASHBOARD["templating"]["list"]
    assert (source["type"], source["name"]) == ("datasource", "datasource")
    assert set(column(reader, queue["query"])) == {HOSTILE, "other", "seldom"}
    want = {"type": source["query"], "uid": "${datasource}"}
    assert all(asks["datasource"] == want for asks in (queue, *DASHBOARD["panels"]))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
