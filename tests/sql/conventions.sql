-- The catalog as linter: what holds for every object, whoever adds it.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(22);

create temporary view routine as
select p.proname::text as name, p.proname like '\_%' as is_private, p.*
from pg_proc as p
where p.pronamespace = 'pgqueue'::regnamespace;

create temporary view relation as
select c.oid, c.relname::text as name, c.relkind, c.relpersistence, c.relispartition
from pg_class as c
where c.relnamespace = 'pgqueue'::regnamespace;

select is_empty(
    $$ select r.name from routine as r
       where not 'search_path=pg_catalog, pg_temp' = any (coalesce(r.proconfig, '{}')) $$,
    'every function pins its search_path'
);
select is_empty(
    $$ select r.name from routine as r group by r.name having count(*) > 1 $$,
    'no function is overloaded'
);
select is_empty(
    $$ select r.name from routine as r where obj_description(r.oid, 'pg_proc') is null $$,
    'every function has a comment'
);
select is_empty(
    $$ select r.name from routine as r where not r.is_private and not r.prosecdef and r.name <> 'version' $$,
    'every public verb is security definer, so that no role needs the tables'
);
select is_empty(
    $$ select r.name from routine as r where r.is_private and r.prosecdef $$,
    'no private function is security definer'
);
select is_empty(
    $$ select r.name from routine as r where r.proisstrict $$,
    'no function is strict: a null argument must be refused, not vanish'
);
select is_empty(
    $$ select r.name from routine as r
       where not r.is_private and r.provolatile <> 'v' and r.name <> 'version' $$,
    'every verb is volatile'
);
select is_empty(
    $$ select r.name, a.name from routine as r, unnest(r.proargnames) as a (name)
       where quote_ident(a.name) <> a.name or quote_ident(r.name) <> r.name $$,
    'no function or parameter needs quotes'
);
select is_empty(
    $$ select r.name from relation as r where quote_ident(r.name) <> r.name $$,
    'no relation needs quotes'
);
select is_empty(
    $$ select r.name from relation as r
       where r.relkind in ('r', 'p', 'v') and obj_description(r.oid, 'pg_class') is null $$,
    'every table and view has a comment'
);
select is_empty(
    $$ select r.name, a.attname from relation as r
       join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
       where r.relkind in ('r', 'p', 'v') and not r.relispartition
           and col_description(r.oid, a.attnum) is null $$,
    'every column has a comment'
);
select is_empty(
    $$ select r.name from relation as r
       where r.relkind = 'i' and r.name not like 'run\_%' and r.name not like '%\_pkey'
           and obj_description(r.oid, 'pg_class') is null $$,
    'every index says which question it answers'
);
select is_empty(
    $$ select r.name from relation as r where r.relpersistence <> 'p' $$,
    'nothing is unlogged or temporary'
);
select is_empty(
    $$ select r.name from relation as r
       where r.relkind in ('r', 'p', 'S') and (r.name like '\_cell\_%') = (r.oid = any (array(
           select unnest(e.extconfig) from pg_extension as e where e.extname = 'pgqueue'
       ))) $$,
    'every table and sequence is marked for pg_dump, but for the cells: what they hold only saves work'
);
select is_empty(
    $$ select unnest(e.extcondition) as condition from pg_extension as e
       where e.extname = 'pgqueue' except select '' $$,
    'pg_dump takes every row'
);
select is_empty(
    $$ select t.tgname from pg_trigger as t join relation as r on r.oid = t.tgrelid $$,
    'no table has a trigger: a restore would fire it'
);
select is_empty(
    $$ select r.name from relation as r where r.relkind in ('r', 'p')
       and r.name not like 'run%' and (xpath('/row/n/text()', query_to_xml(
           format('select count(*) as n from pgqueue.%I', r.name), false, true, ''
       )))[1]::text <> '0' $$,
    'the install script seeds no row'
);
select is_empty(
    $$ select c.conname from pg_constraint as c
       where c.connamespace = 'pgqueue'::regnamespace and c.conname ~ '\d$' $$,
    'every constraint has a name that was chosen'
);
select is_empty(
    $$ select r.name from routine as r where r.prosrc ~* 'when\s+others' $$,
    'no function catches everything'
);
select is_empty(
    $$ select r.name from routine as r
       where r.prosrc ~* '\mexecute\M' and r.name <> '_change_access' $$,
    'no function but one runs dynamic SQL'
);

select is_empty(
    $$ select r.name from routine as r
       where r.prosrc ~ '\mpg_advisory_(xact_)?lock' or r.prosrc ~* '\mlock table\M(?![^;]*\mnowait\M)' $$,
    'no function waits for a lock that any role may take'
);

-- claim() leases one job without a sort and many with one: the UPDATE stands there twice.
select results_eq(
    $$ select count(*), count(distinct regexp_replace(m.leased[1], '\s+', ' ', 'g'))
       from routine as r
       cross join regexp_matches(r.prosrc, 'update pgqueue\.job as j\s+?set token.*?returning j\.\*', 'g') as m (leased)
       where r.name = 'claim' $$,
    'values (2::bigint, 1::bigint)', 'claim leases one job as it leases many'
);

select * from finish();
rollback;
