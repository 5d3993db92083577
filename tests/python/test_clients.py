"""What docs/clients.md says about drivers and tools, with those that are installed."""

import asyncio
import json
import shutil
import subprocess

import asyncpg
import documents
import pgqueue
import pgqueue.install
import psycopg2
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from conftest import column, one
from sqlalchemy.dialects.postgresql import JSONB

PAGE = documents.text("docs/clients.md")
PAYLOADS = ({"to": "ada"}, [1, "x"], "text", None)
NODE = documents.REPO / ".venv/node/node_modules"


def said(code: str) -> str:
    """Return what is on the page."""
    assert f"`{code}`" in PAGE or f" {code}`" in PAGE
    return code


def evaluated(code: str, **names: object) -> object:
    return eval(said(code), names)


@pytest.fixture(autouse=True)
def here(db, monkeypatch) -> None:
    monkeypatch.setenv("PGDATABASE", db.info.dbname)


@pytest.fixture
def engine():
    engine = sqlalchemy.create_engine("postgresql+psycopg://")
    yield engine
    engine.dispose()


def payloads(db) -> list[object]:
    return column(db, "select payload from pgqueue.job order by id")


def test_func_of_sqlalchemy_needs_the_type_of_the_payload(db, engine):
    func = sqlalchemy.func
    with engine.begin() as conn, pytest.raises(sqlalchemy.exc.ProgrammingError):
        conn.scalar(sqlalchemy.select(func.pgqueue.enqueue("emails", '{"a": 1}')))
    with engine.begin() as conn:
        for payload in PAYLOADS[:3]:
            call = evaluated(
                'func.pgqueue.enqueue("emails", literal(payload, JSONB))',
                func=func,
                literal=sqlalchemy.literal,
                JSONB=JSONB,
                payload=payload,
            )
            conn.scalar(sqlalchemy.select(call))
        text = sqlalchemy.text("select pgqueue.enqueue(:queue, :payload)")
        conn.execute(text, {"queue": "emails", "payload": json.dumps(PAYLOADS[3])})
    assert payloads(db) == list(PAYLOADS)


def test_the_plain_script_runs_in_a_migration_with_psycopg_2(db):
    call = "op.get_bind().execution_options(no_parameters=True).exec_driver_sql(script)"
    assert f"`{call}`" in documents.text("docs/fastapi.md")
    db.execute("drop extension pgqueue")
    script = pgqueue.install.script()
    engine = sqlalchemy.create_engine("postgresql+psycopg2://")
    with engine.begin() as conn:
        op = Operations(MigrationContext.configure(conn))
        with pytest.raises(sqlalchemy.exc.StatementError, match="bind parameter"):
            op.execute(script)
        eval(call, {"op": op, "script": script})
    engine.dispose()
    job = pgqueue.enqueue(db, "q")
    assert column(db, "select id from pgqueue.claim('q', 'w')") == [job]


def test_asyncpg_passes_json_as_text(db):
    async def enqueue() -> None:
        conn = await asyncpg.connect(host=db.info.host, port=db.info.port)
        for payload in PAYLOADS:
            text = evaluated("json.dumps(payload)", json=json, payload=payload)
            await conn.fetchval("select pgqueue.enqueue('q', $1)", text)
        await conn.close()

    asyncio.run(enqueue())
    assert payloads(db) == list(PAYLOADS)


def test_an_array_of_payloads_needs_a_cast_in_psycopg_2(db):
    conn = psycopg2.connect("")
    conn.autocommit = True
    texts = [json.dumps(payload) for payload in PAYLOADS]
    call = said("enqueue_many(%s, %s::jsonb[])")
    with conn.cursor() as cursor:
        with pytest.raises(psycopg2.errors.UndefinedFunction):
            uncast = call.replace("::jsonb[]", "")
            cursor.execute(f"select pgqueue.{uncast}", ["q", texts])
        cursor.execute(f"select pgqueue.{call}", ["q", texts])
    conn.close()
    assert payloads(db) == list(PAYLOADS)


@pytest.mark.filterwarnings("ignore:Did not recognize type")
def test_alembic_leaves_pgqueue_alone_as_told(db, engine):
    mine = sqlalchemy.MetaData()
    (code,) = [c for c in PAGE.split("`") if c.startswith("include_name=")]
    filtered = {"include_name": eval(code.removeprefix("include_name="))}
    with engine.connect() as conn:
        assert proposed(conn, mine) == []
        assert "remove_table" in proposed(conn, mine, include_schemas=True)
        assert proposed(conn, mine, include_schemas=True, **filtered) == []


def proposed(conn, metadata, **options) -> list[str]:
    context = MigrationContext.configure(conn, opts=options)
    return [change[0] for change in compare_metadata(context, metadata)]


@pytest.mark.skipif(
    not (NODE / "postgres").is_dir() or shutil.which("node") is None,
    reason="make .venv/node needs npm",
)
def test_payloads_are_made_json_by_us_for_pg_and_by_postgres_js_itself(db, tmp_path):
    (tmp_path / "node_modules").symlink_to(NODE)
    (tmp_path / "enqueue.mjs").write_text("""
        import pg from "pg";
        import postgres from "postgres";
        const payloads = JSON.parse(process.argv[2]);
        const client = new pg.Client();
        await client.connect();
        const sql = postgres({ host: process.env.PGHOST });
        for (const payload of payloads) {
          await client.query("select pgqueue.enqueue($1, $2)", ["pg", JSON.stringify(payload)]);
          if (payload !== null) await sql`select pgqueue.enqueue(${"js"}, ${payload})`;
        }
        await sql`select pgqueue.enqueue(${"twice"}, ${JSON.stringify(payloads[0])})`;
        const { rows } = await client.query("select id from pgqueue.claim('pg', 'w')");
        console.log(typeof rows[0].id);
        await client.end();
        await sql.end();
    """)
    ran = subprocess.run(
        ["node", "enqueue.mjs", json.dumps(PAYLOADS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("string\n", "")
    stored = "select payload from pgqueue.job where queue = %s order by id"
    assert column(db, stored, "pg") == list(PAYLOADS)
    assert column(db, stored, "js") == list(PAYLOADS[:3])
    assert (
        one(db, "select jsonb_typeof(payload) from pgqueue.job where queue = 'twice'")
        == "string"
    )
