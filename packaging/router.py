"""Writes the router: a script for a database with PL/Proxy, with the functions and views of pgqueue.

Arguments, results and columns come from the catalog of the database of libpq's variables, where
pgqueue has just been installed. ROUTES says where each function goes; one that is missing there
stops the build, so that the router can never lag behind.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psycopg

HOME = "pgqueue._home({}, shards, pgqueue._above(shards))"
OF_NAME = "pgqueue.shard_of(coalesce(name, ''), {})"
# Where a call goes: to the shard of an id, of a schedule's name, or of a key; to all, or to any.
ROUTES = {
    "enqueue": ("one", "pgqueue._place(batch_id || after, group_key, unique_key)"),
    "create_batch": ("one", "pgqueue._place(null, group_key, null)"),
    "close_batch": ("find", HOME.format("batch_id")),
    "enqueue_many": ("keys", None),
    **dict.fromkeys(
        "status result await why cancel run_now reprioritize rerun steps".split(),
        ("find", HOME.format("job_id")),
    ),
    **dict.fromkeys(
        "complete fail progress save_step suspend results_of".split(),
        ("find", HOME.format("token")),
    ),
    **dict.fromkeys(("redrive_job", "discard"), ("find", HOME.format("dead_id"))),
    **dict.fromkeys(("extend", "complete_many", "finish", "release"), ("split", None)),
    "schedule": ("recur", None),
    **dict.fromkeys(
        "unschedule pause_schedule resume_schedule run_schedule".split(),
        ("find", OF_NAME.format("shards")),
    ),
    **dict.fromkeys(
        # Who waits for an event may be anywhere.
        "pause resume configure grant_access revoke_access emit".split(),
        ("all", None),
    ),
    **dict.fromkeys(("purge", "reap"), ("all", "sum")),
    "after_failover": ("all", "bool_or"),
    "maintain": ("all", "sum"),
    **dict.fromkeys(("redrive", "cancel_many", "discard_many"), ("until", None)),
    **dict.fromkeys(("claim", "claim_from"), ("first", None)),
    **dict.fromkeys(("next_slots", "version"), ("one", "pgqueue._any()")),
    **dict.fromkeys(("rest", "health", "metrics", "shard_of"), ("own", None)),
    # Triggers are where the rows are; a shard gets its number itself.
    **dict.fromkeys(("enqueue_row", "shard"), ("none", None)),
}
# What a shard also says of a job that has moved from it, if its log still has an attempt: another may know better.
# For steps, it is that there are none.
IS_GONE = (
    "exists (select from pgqueue._on_status(place, job_id) as s where s.state = 'gone')"
)
WEAK = {
    "status": "answer.state = 'gone'",
    "why": "answer like 'gone;%'",
    "result": f"case when answer is null then {IS_GONE} end",
    "await": f"case when answer = '0' then {IS_GONE} end",
    "steps": "false",
}
# What says that a shard is down, or read-only.
DOWN = (
    "internal_error or connection_exception or admin_shutdown or crash_shutdown or cannot_connect_now"
    " or read_only_sql_transaction"
)
HEAD = Path(__file__).with_name("router.sql")
# PL/Proxy passes times and intervals as text, in the style of the session, and reads them in that style.
STYLE = {"datestyle": "'ISO, YMD'", "intervalstyle": "'postgres'"}
STYLED = "".join(f"    set {name} = {value}\n" for name, value in STYLE.items())
SETTINGS = (
    "    set search_path = pg_catalog, pg_temp\n    set client_min_messages = warning\n"
    + STYLED
)
# A shard may have another style. Only until the end of the call: a pooler may lend its session to others.
IN_STYLE = "where (select pg_catalog.concat({})) is not null".format(
    ", ".join(
        f"pg_catalog.set_config('{name}', {value}, true)"
        for name, value in STYLE.items()
    )
)
HAS_TIMES = re.compile(r"timestamp|interval|pgqueue\.job")
FUNCTIONS = """
select p.proname, p.proretset, t.oid = 'void'::regtype, pg_get_function_arguments(p.oid),
    pg_get_function_result(p.oid), pg_get_functiondef(p.oid), obj_description(p.oid, 'pg_proc'),
    array(
        select a.name from unnest(p.proargnames) with ordinality as a (name, n)
        where a.n <= p.pronargs order by a.n
    ),
    array(
        select format_type(a.type, null) from unnest(p.proargtypes::oid[]) with ordinality as a (type, n) order by a.n
    )
from pg_proc as p join pg_type as t on t.oid = p.prorettype
where p.pronamespace = 'pgqueue'::regnamespace and p.proname !~ '^_' and p.prokind = 'f' order by p.proname
"""
RELATIONS = """
select c.relname, c.relkind, array_agg(quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod)
    order by a.attnum), obj_description(c.oid, 'pg_class')
from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'pgqueue'::regnamespace and (c.relkind = 'v' and c.relname !~ '^_'
    or c.relname in ('job', '_progress', '_terms'))
group by c.oid, c.relname, c.relkind order by c.relname
"""


@dataclass
class Function:
    """A public function of pgqueue."""

    name: str
    is_set: bool
    is_void: bool
    arguments: str
    result: str
    definition: str
    comment: str
    names: list[str]
    types: list[str]

    @property
    def returns(self) -> str:
        return "text" if self.is_void else self.result

    def call(self, place: str = "place", **instead: str) -> str:
        """Call it on a shard."""
        given = [instead.get(name, f"{self.name}.{name}") for name in self.names]
        return f"pgqueue._on_{self.name}({', '.join([place, *given])})"

    def on_shard(self) -> str:
        """Write the function that calls it on the shard at a place of the list."""
        taken = [f"{n} {t}" for n, t in zip(self.names, self.types, strict=True)]
        what = f"pgqueue.{self.name}({', '.join(self.names)})"
        select = f"{what}::text" if self.is_void else f"* from {what}"
        if self.name in ("claim", "claim_from"):
            # A session of the router outlives that of the shard. The argument has it called first.
            worker = "case when f.skipped is not null then worker end"
            what = what.replace(", worker,", f", {worker},")
            select = f"c.* from pgqueue.after_failover() as f (skipped) cross join lateral {what} as c"
        if HAS_TIMES.search(self.result):
            select += f"\n    {IN_STYLE}"
        return (
            f"create function pgqueue._on_{self.name}({', '.join(['on_place int', *taken])})\n"
            f"    returns {self.returns}\n    language plproxy\nas $$\n"
            f"    cluster 'pgqueue';\n    run on on_place;\n    select {select};\n$$;\n"
        )

    def public(self, body: str, declare: str = "") -> str:
        declared = f"declare\n{declare}" if declare else ""
        return (
            f"create function pgqueue.{self.name}({self.arguments})\n    returns {self.result}\n"
            f"    language plpgsql\n{SETTINGS}as $$\n#variable_conflict use_column\n"
            f"{declared}begin\n{body}end;\n$$;\n"
        )

    def answer(self, call: str) -> str:
        if self.is_set:
            return f"return query select * from {call};"
        return f"perform {call};" if self.is_void else f"return {call};"


def one(f: Function, place: str) -> str:
    place = qualified(f, place)
    return f.public(f"    {f.answer(f.call(place))}\n")


def find(f: Function, home: str) -> str:
    """Go to where the id or token says it is, and to the others if that was moved, or that shard is down.

    If none knows it, a shard that is down might. But a lease cannot have moved, and steps are asked for by
    workers whose jobs seldom have any: for these it matters only that the first one to ask is up.
    """
    call = f.call()
    stop = "            return;\n" if f.is_set or f.is_void else ""
    ask, declare, weakly = f"            {f.answer(call)}\n{stop}", "", ""
    note, matters = "", "down is not null"
    if f.name in WEAK:
        weak = qualified(f, WEAK[f.name])
        ask = f"            answer := {call};\n"
        then, unless = "return answer", f"({weak}) is not true"
        declare = f"    answer {f.result};\n"
        if f.is_set:
            ask = f"            return query select * from {call} as answer where ({weak}) is not true;\n"
            then, unless, declare = "return", "found", ""
        ask += f"            if {unless} then\n                {then};\n            end if;\n"
        ask += "            weak_at := coalesce(weak_at, place);\n"
        declare += "    weak_at int;\n"
        weakly = (
            f"    if weak_at is not null then\n        {f.answer(f.call('weak_at'))}\n"
            + ("        return;\n" if stop else "")
            + "    end if;\n"
        )
    if f.name == "steps":
        matters += " and down_at = home"
    elif "token" in f.names:
        note = (
            "                is_lost := is_lost or place = home and code = 'PQ002';\n"
        )
        declare += "    is_lost boolean := false;\n"
        matters += " and not is_lost"
    stacked = (
        "                get stacked diagnostics code = returned_sqlstate, said = message_text,\n"
        "                    detail = pg_exception_detail, hint = pg_exception_hint;\n"
    )
    return f.public(
        "    for place in select n from generate_series(0, shards - 1) as n order by n <> home, n loop\n        begin\n"
        f"{ask}        exception\n            when sqlstate 'PQ001' or sqlstate 'PQ002' then\n{stacked}"
        f"                problem := coalesce(problem, array[code, said, detail, hint]);\n{note}"
        f"            when {DOWN} then\n{stacked}"
        "                down := coalesce(down, array[code, said, detail, hint]);\n"
        "                down_at := coalesce(down_at, place);\n"
        f"        end;\n    end loop;\n    if {matters} then\n        perform pgqueue._raise(down);\n    end if;\n"
        f"{weakly}    perform pgqueue._raise(problem);\n",
        f"    shards int := pgqueue._count();\n    home int := {qualified(f, home)};\n    place int;\n"
        "    problem text[];\n    down text[];\n    down_at int;\n"
        f"{declare}    code text;\n    said text;\n    detail text;\n    hint text;\n",
    )


def all_of(f: Function, total: str | None) -> str:
    if f.name == "maintain":
        return f.public(
            "    return query\n    select m.task, sum(m.done)::bigint\n"
            f"    from pgqueue._up() as u (place)\n    cross join lateral {f.call('u.place')} as m\n"
            "    group by m.task;\n"
        )
    if total:
        return f.public(
            f"    return (select {total}({f.call('u.place')})::{f.result} from pgqueue._up() as u (place));\n"
        )
    begin, end, told = f"perform {f.call()};", "", ""
    if not f.is_void:
        begin, end = f"told := greatest(told, {f.call()});", "    return told;\n"
        told = f"    told {f.result};\n"
    return f.public(
        "    for place in select * from generate_series(0, pgqueue._count() - 1) loop\n        begin\n"
        f"            {begin}\n"
        f"        exception when {DOWN} then\n            down := down || (place + 1);\n        end;\n"
        "    end loop;\n    if down <> '{}' then\n        raise exception using\n"
        "            errcode = 'connection_failure',\n"
        "            message = 'not done on shards that are down: ' || array_to_string(down, ', '),\n"
        "            hint = 'It is done on the others. Repeat the call once pgqueue.shards() says that they are up.';\n"
        f"    end if;\n{end}",
        f"    place int;\n    down int[] := '{{}}';\n{told}",
    )


def until(f: Function, _: None) -> str:
    """Go on with the next shard until there are max_jobs."""
    return f.public(
        "    for place in select * from pgqueue._up() loop\n        exit when left_over <= 0;\n"
        f"        return query select * from {f.call(max_jobs='left_over')};\n"
        "        get diagnostics found = row_count;\n        left_over := left_over - found;\n    end loop;\n",
        f"    place int;\n    found int;\n    left_over int := {f.name}.max_jobs;\n",
    )


def first(f: Function, _: None) -> str:
    """Take from the first shard that has something, in a random order; others are not asked."""
    return f.public(
        "    for place in select n from generate_series(0, shards - 1) as n order by random() loop\n"
        "        continue when not pgqueue._is_up(place);\n"
        f"        return query select * from {f.call()};\n        exit when found;\n    end loop;\n",
        "    shards int := pgqueue._count();\n    place int;\n",
    )


def chosen(f: Function, *names: str) -> dict[str, str]:
    """The elements of these arrays that go to one shard; all of an array where which is null."""
    return {
        n: f"case when which is null or {f.name}.{n} is null then {f.name}.{n}"
        f" else array(select {f.name}.{n}[w.n] from unnest(which) as w (n)) end"
        for n in names
    }


def counted_from_1(f: Function, *names: str) -> str:
    """Have these arrays begin at 1, wherever the caller lets them begin."""
    return "".join(
        f"    {f.name}.{n} := case when array_ndims({f.name}.{n}) = 1"
        f" then array(select unnest({f.name}.{n})) else {f.name}.{n} end;\n"
        for n in names
    )


def split(f: Function, _: None) -> str:
    """Send to each shard the leases of its tokens, in one call, and the lost ones to the others.

    A job may have moved since its id was given out, but not while a lease is held; only a token that is
    older than the shards is of the first.
    """
    arrays = [n for n, t in zip(f.names, f.types, strict=True) if t.endswith("[]")]
    job_ids, tokens, *others = (f"{f.name}.{n}" for n in arrays)
    lengths = [f"cardinality({n}) <> cardinality({job_ids})" for n in (tokens, *others)]
    call = f.call(**chosen(f, *arrays))
    if f.result.startswith("SETOF"):
        got = f"select case when i.id = any (held) then 'held' else 'lost' end from unnest({job_ids}) with"
        got = (
            f"                held := array(select * from {call});\n"
            f"                got := array({got} ordinality as i (id, n) where i.n = any (which) order by i.n);\n"
        )
        answer = f"select distinct i.id from unnest({job_ids}, said) as i (id, said) where i.said = 'held'"
    else:
        got = f"                got := array(select c.status from {call} as c);\n"
        answer = f"select i.id, i.said from unnest({job_ids}, said) with ordinality as i (id, said, n) order by i.n"
    return f.public(
        counted_from_1(f, *arrays) + "    if is_odd then\n        -- To be refused.\n"
        f"        return query select * from {call.replace('place', 'pgqueue._any()', 1)};\n"
        "        return;\n    end if;\n"
        f"    said := array_fill('lost'::text, array[cardinality({job_ids})]);\n"
        "    for turn in 1 .. 2 loop\n"
        "        places := case when turn = 2 and 'lost' = any (said) then array(select pgqueue._up()) else '{}' end;\n"
        "        for place, which in\n"
        "            select p.place, array_agg(i.n::int order by i.n)\n"
        f"            from unnest({tokens}, said) with ordinality as i (token, said, n)\n"
        "            cross join lateral (\n"
        "                select pgqueue._home(i.token, shards, above) where turn = 1\n"
        "                union all\n"
        "                select o.place from unnest(places) as o (place) where o.place <> pgqueue._home(i.token, shards, above)\n"
        "            ) as p (place)\n"
        "            where i.said = 'lost'\n            group by 1\n        loop\n            begin\n"
        + got
        + f"            exception when {DOWN} then\n"
        "                get stacked diagnostics code = returned_sqlstate, message = message_text,\n"
        "                    detail = pg_exception_detail, hint = pg_exception_hint;\n"
        "                problem := coalesce(problem, array[code, message, detail, hint]);\n"
        "                continue;\n            end;\n"
        "            for n in 1 .. cardinality(which) loop\n"
        "                said[which[n]] := case when said[which[n]] = 'lost' then got[n] else said[which[n]] end;\n"
        "            end loop;\n        end loop;\n    end loop;\n"
        "    if problem is not null then\n        perform pgqueue._raise(problem);\n    end if;\n"
        f"    return query {answer};\n",
        f"    is_odd boolean := coalesce({' or '.join(lengths)}, false) or {job_ids} is null\n"
        f"        or {tokens} is null or array_ndims({job_ids}) > 1;\n"
        "    shards int := pgqueue._count();\n    above bigint := pgqueue._above(shards);\n"
        "    places int[];\n    place int;\n    which int[];\n    held bigint[];\n"
        "    got text[];\n    said text[];\n    problem text[];\n    code text;\n    message text;\n"
        "    detail text;\n    hint text;\n",
    )


def by_keys(f: Function, _: None) -> str:
    """Split what is enqueued by its keys, one call for each shard; the ids in the order of the input."""
    arrays = ("payloads", "unique_keys", "group_keys")
    payloads, unique_keys, group_keys = (f"{f.name}.{n}" for n in arrays)
    batch = f"{f.name}.batch_id"
    key = f"coalesce({group_keys}[s.n], {unique_keys}[s.n])"
    return f.public(
        counted_from_1(f, *arrays) + "    places := array(\n"
        f"        select case when not is_odd and {key} is not null\n"
        f"            then pgqueue.shard_of({key}, shards) else other end\n"
        f"        from generate_subscripts({payloads}, 1) as s (n)\n"
        "        order by s.n\n    );\n"
        f"    if {batch} is not null and other <> any (places) then\n"
        "        -- Refuses the first.\n"
        f"        perform pgqueue._place(array[{batch}], {key}, null)\n"
        "        from generate_subscripts(places, 1) as s (n) where places[s.n] <> other order by s.n;\n"
        "    end if;\n"
        "    for place, which in\n"
        "        select p.place, array_agg(p.n::int order by p.n)\n"
        "        from unnest(places) with ordinality as p (place, n) where not is_odd group by 1\n"
        "        union all\n        -- To be refused.\n"
        f"        select other, null where is_odd or coalesce(cardinality({payloads}), 0) = 0\n    loop\n"
        f"        got := array(select * from {f.call(**chosen(f, *arrays))});\n"
        "        for n in 1 .. coalesce(cardinality(which), 0) loop\n            ids[which[n]] := got[n];\n"
        "        end loop;\n    end loop;\n    return query select i.id from unnest(ids) as i (id);\n",
        "    shards int := pgqueue._count();\n"
        f"    -- What has no key goes to one shard.\n    other int := case when {batch} is not null\n"
        f"        then pgqueue._place(array[{batch}], null, null) else pgqueue._any() end;\n"
        f"    is_odd boolean := coalesce(cardinality({unique_keys}) <> cardinality({payloads})\n"
        f"        or cardinality({group_keys}) <> cardinality({payloads}) or array_ndims({payloads}) > 1, false);\n"
        "    places int[];\n    place int;\n    which int[];\n    got bigint[];\n    ids bigint[] := '{}';\n",
    )


def recur(f: Function, _: None) -> str:
    """Put a schedule where its group is, and take it from where it was if its group is another now.

    A shard that is down may have it, and matters unless it is already in its place. Who may only schedule cannot look.
    """
    found = "select s.paused from pgqueue._on_schedule_paused({}, schedule.name) as s (paused)"
    return f.public(
        "    begin\n"
        f"        is_there := exists ({found.format('home')});\n"
        "        for place in select n from generate_series(0, shards - 1) as n where n <> home loop\n            begin\n"
        f"                for paused in {found.format('place')} loop\n"
        "                    problem := pgqueue._problem(place);\n"
        "                    if problem is not null then\n"
        "                        raise connection_failure using message = format('shard %s %s', place + 1, problem);\n"
        "                    end if;\n"
        "                    elsewhere := elsewhere || place;\n                    is_paused := is_paused or paused;\n"
        "                end loop;\n"
        f"            exception when {DOWN} then\n"
        "                if not is_there then\n                    raise;\n                end if;\n"
        "            end;\n        end loop;\n"
        "    exception when insufficient_privilege then\n        null;\n    end;\n"
        f"    {f.answer(f.call('home'))}\n"
        "    if is_paused and not is_there then\n        perform pgqueue._on_pause_schedule(home, schedule.name);\n    end if;\n"
        "    foreach place in array elsewhere loop\n        begin\n"
        "            perform pgqueue._on_unschedule(place, schedule.name);\n"
        "        exception when sqlstate 'PQ001' then\n            null;\n        end;\n    end loop;\n",
        "    shards int := pgqueue._count();\n"
        "    home int := pgqueue.shard_of(coalesce(schedule.group_key, schedule.name, ''), shards);\n"
        "    place int;\n    elsewhere int[] := '{}';\n    is_there boolean := false;\n"
        "    paused boolean;\n    is_paused boolean := false;\n    problem text;\n",
    )


def qualified(f: Function, place: str) -> str:
    for name in f.names:
        for before in "( ":
            place = place.replace(f"{before}{name}", f"{before}{f.name}.{name}")
    return place


TEMPLATES = {
    "one": one,
    "keys": by_keys,
    "recur": recur,
    "find": find,
    "all": all_of,
    "until": until,
    "first": first,
    "split": split,
}


def view(name: str, columns: list[str], comment: str) -> str:
    names = [column.split(" ")[0] for column in columns]
    shown = ", ".join(f"v.{n}" for n in names if n != "shard")
    title = comment.partition("\n\n")[0].replace("'", "''")
    has_times = HAS_TIMES.search(", ".join(columns))
    in_style = f"\n    {IN_STYLE}" if has_times else ""
    return (
        f"create function pgqueue._on_{name}(on_place int)\n    returns table ({', '.join(columns)})\n"
        f"    language plproxy\n{STYLED if has_times else ''}as $$\n    cluster 'pgqueue';\n    run on on_place;\n"
        f"    select {', '.join(names)} from pgqueue.{name}{in_style};\n$$;\n"
        f"create view pgqueue.{name} as\nselect u.place + 1 as shard, {shown}\nfrom pgqueue._up(reads => true) as u (place)\n"
        f"cross join lateral pgqueue._on_{name}(u.place) as v;\n"
        f"comment on view pgqueue.{name} is\n'Of all shards that answer. {title}';\n"
    )


def main() -> None:
    with psycopg.connect() as conn:
        functions = [Function(*row) for row in conn.execute(FUNCTIONS)]
        relations = conn.execute(RELATIONS).fetchall()
    unknown = {f.name for f in functions} ^ set(ROUTES)
    if unknown:
        sys.exit(
            f"packaging/router.py: ROUTES and the catalog differ in {sorted(unknown)}"
        )
    head, _, tail = (
        HEAD.read_text().replace("@DOWN@", DOWN).partition("-- The functions.\n")
    )
    parts = [head.rstrip("\n") + "\n"]
    for name, kind, columns, _ in sorted(
        relations,
        key=lambda r: ("_progress", "_terms", "job").index(r[0]) if r[1] != "v" else 9,
    ):
        if kind != "v":
            parts.append(f"create type pgqueue.{name} as ({', '.join(columns)});\n")
    shard_of = next(f for f in functions if f.name == "shard_of")
    parts.append(
        shard_of.definition.replace("CREATE OR REPLACE", "create", 1).rstrip() + ";\n"
    )
    parts += [
        f.on_shard()
        for f in functions
        if ROUTES[f.name][0] != "none" and f.name != "shard_of"
    ]
    parts.append(tail)
    parts += [
        TEMPLATES[how](f, where)
        for f in functions
        for how, where in [ROUTES[f.name]]
        if how in TEMPLATES
    ]
    parts += [view(name, *rest) for name, kind, *rest in relations if kind == "v"]
    parts.append(
        "revoke all on schema pgqueue from public;\nrevoke all on all routines in schema pgqueue from public;\n"
    )
    print("\n".join(parts), end="")


if __name__ == "__main__":
    main()
