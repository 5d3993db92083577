"""What is in schema pgqueue, one line for each thing: to compare two databases."""

import psycopg

RIGHTS = (
    "(select string_agg(concat_ws(' ', a.grantee::regrole, a.privilege_type, a.is_grantable), ', ' order by"
    " a.grantee::regrole::text, a.privilege_type) from aclexplode(coalesce({0}, acldefault({1}, {2}))) as a)"
)
# Rights that are part of the extension: pg_dump leaves them out.
OURS = (
    "coalesce((select i.initprivs from pg_init_privs as i where (i.classoid, i.objoid, i.objsubid) = ({0}, {1}, 0)),"
    " acldefault({2}, {3}))"
)
KIND = "(case c.relkind when 'S' then 's' else 'r' end)::\"char\""
QUERY = f"""
select concat_ws(' ', 'relation', c.relname, c.relkind, c.relpersistence, c.relreplident, c.reloptions,
    'of', c.relowner::regrole, pg_get_expr(c.relpartbound, c.oid), quote_literal(obj_description(c.oid, 'pg_class')))
from pg_class as c where c.relnamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', 'rights', c.relname, {RIGHTS.format("c.relacl", KIND, "c.relowner")}, 'ours',
    {RIGHTS.format(OURS.format("'pg_class'::regclass", "c.oid", KIND, "c.relowner"), KIND, "c.relowner")})
from pg_class as c where c.relnamespace = to_regnamespace('pgqueue') and c.relkind in ('r', 'p', 'v', 'S')
union all
select concat_ws(' ', 'column', a.attrelid::regclass, row_number() over (partition by a.attrelid order by a.attnum),
    a.attname, format_type(a.atttypid, a.atttypmod), case when a.attnotnull then 'not null' end,
    pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attgenerated, a.attcollation::regcollation, a.attstorage,
    a.attcompression, a.attstattarget, a.attacl,
    -- Some servers note here what differs for each column ever made.
    (select string_agg(o.option, ',') from unnest(a.attoptions) as o (option) where o.option !~ '^pg_attver='),
    quote_literal(col_description(a.attrelid, a.attnum)))
from pg_class as c
join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef as d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
where c.relnamespace = to_regnamespace('pgqueue') and c.relkind not in ('i', 'I', 'S')
union all
select concat_ws(' ', 'constraint', k.conrelid::regclass, k.conname, pg_get_constraintdef(k.oid), k.convalidated)
from pg_constraint as k where k.connamespace = to_regnamespace('pgqueue') and k.contype <> 'n'
union all
select concat_ws(' ', pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisclustered, i.indisreplident)
from pg_index as i join pg_class as c on c.oid = i.indexrelid where c.relnamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', 'sequence', s.seqrelid::regclass, s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin,
    s.seqmax, s.seqcache, s.seqcycle)
from pg_sequence as s join pg_class as c on c.oid = s.seqrelid where c.relnamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', 'view', c.oid::regclass, pg_get_viewdef(c.oid))
from pg_class as c where c.relnamespace = to_regnamespace('pgqueue') and c.relkind = 'v'
union all
select concat_ws(' ', pg_get_functiondef(p.oid), 'of', p.proowner::regrole, {RIGHTS.format("p.proacl", "'f'", "p.proowner")},
    'ours', {RIGHTS.format(OURS.format("'pg_proc'::regclass", "p.oid", "'f'", "p.proowner"), "'f'", "p.proowner")},
    quote_literal(obj_description(p.oid, 'pg_proc')))
from pg_proc as p where p.pronamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', 'type', t.oid::regtype, t.typtype, t.typowner::regrole, t.typacl, quote_literal(obj_description(t.oid, 'pg_type')))
from pg_type as t where t.typnamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', pg_get_triggerdef(t.oid), t.tgenabled)
from pg_trigger as t join pg_class as c on c.oid = t.tgrelid where c.relnamespace = to_regnamespace('pgqueue')
union all
select concat_ws(' ', 'schema', n.nspname, {RIGHTS.format("n.nspacl", "'n'", "n.nspowner")}, obj_description(n.oid))
from pg_namespace as n where n.nspname = 'pgqueue'
union all
select concat_ws(' ', 'dumped', m.relation::regclass, quote_literal(m.condition))
from pg_extension as e cross join unnest(e.extconfig, e.extcondition) as m (relation, condition)
where e.extname = 'pgqueue'
union all
select concat_ws(' ', 'member', pg_describe_object(d.classid, d.objid, d.objsubid))
from pg_depend as d join pg_extension as e on e.oid = d.refobjid
where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e' and e.extname = 'pgqueue'
"""


def catalog(conn: psycopg.Connection) -> set[str]:
    with conn.transaction():
        conn.execute("set local search_path = pg_catalog, pg_temp")
        return {line for (line,) in conn.execute(QUERY)}
