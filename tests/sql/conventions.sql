-- The catalog as linter: what holds for every object, whoever adds it.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(46);

create temporary view routine as
select p.proname::text as name, p.proname like '\_%' as is_private, p.*
from pg_proc as p
where p.pronamespace = 'pgqueue'::regnamespace;

create temporary view relation as
select c.oid, c.relname::text as name, c.relkind, c.relpersistence, c.relispartition
from pg_class as c
where c.relnamespace = 'pgqueue'::regnamespace;

-- Who can call what, once every kind of role has been granted what it may do.
create role pgqueue_granted;
select pgqueue.grant_access('pgqueue_granted', k.kind)
from unnest(array['producer', 'worker', 'scheduler', 'operator', 'reader']) as k (kind);

create temporary view door as
select r.*
from routine as r
where not r.is_private
    -- What runs with its owner's rights, or what anybody else may execute.
    or r.prosecdef
    or exists (
        select from aclexplode(coalesce(r.proacl, acldefault('f', r.proowner))) as a
        where a.grantee <> r.proowner
    )
    -- What a view, trigger, constraint, default, index, policy, cast or argument calls.
    or exists (
        select from pg_depend as d
        where d.refclassid = 'pg_proc'::regclass and d.refobjid = r.oid
    );

select is_empty(
    $$ select d.name from door as d
       -- A procedure that commits can pin nothing: see test_strangers.py.
       where not 'search_path=pg_catalog, pg_temp' = any (coalesce(d.proconfig, '{}')) and d.name <> 'work' $$,
    'every function that a user, a view, a trigger or a constraint can call pins its search_path'
);
select is_empty(
    $$ select r.name from routine as r
       where r.oid not in (select d.oid from door as d) and r.proconfig::text ~ 'search_path' $$,
    'every other function has the search_path of the one that called it'
);
select set_eq(
    $$ select d.name from door as d where d.is_private $$,
    array[
        '_count_jobs', '_count_dead', '_dead_kinds', '_leased', '_recent_runs', '_dead_errors', '_error_like', '_last_state',
        '_grant_again', '_handled', '_hold', '_step_sequences'
    ],
    'nobody but the owner may execute a private function, but for what the views call, the triggers, and work'
);
select is_empty(
    $$ select r.name from routine as r group by r.name having count(*) > 1 $$,
    'no function is overloaded'
);
select is_empty(
    $$ select r.name from routine as r where r.is_private = (obj_description(r.oid, 'pg_proc') is not null) $$,
    'every public function has a comment; those of private ones stand in the source'
);
select is_empty(
    $$ select r.name from routine as r
       where not r.is_private and not r.prosecdef and r.name not in ('version', 'enqueue_row', 'work', 'shard_of') $$,
    'every public function but that of a trigger, and a procedure that commits, is security definer, so that no role needs the tables'
);
select is_empty(
    $$ select r.name from routine as r
       where r.is_private and r.prosecdef and r.name not in (
           select g.object from pgqueue._grants('reader') as g where g.is_function
           union all
           values ('_handled'), ('_hold')
       ) $$,
    'no private function is security definer but those that a view calls as its reader, or work as its caller'
);
select is_empty(
    $$ select r.name from routine as r where r.proisstrict $$,
    'no function is strict: a null argument must be refused, not vanish'
);
select is_empty(
    $$ select r.name from routine as r
       where not r.is_private and r.provolatile <> 'v' and r.name not in ('version', 'shard_of') $$,
    'every public function but version and shard_of is volatile'
);
select is_empty(
    $$ select r.name, a.name from routine as r, unnest(r.proargnames) as a (name)
       where (quote_ident(a.name) <> a.name or quote_ident(r.name) <> r.name)
           and (r.name, a.name) <> ('health', 'check') $$,
    'no function or parameter needs quotes, but for one that is written h.check'
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
    $$ select r.name, a.attname from relation as r
       join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
       where r.relkind in ('r', 'p') and a.atttypid in (
           'regproc'::regtype, 'regprocedure'::regtype, 'regoper'::regtype, 'regoperator'::regtype,
           'regnamespace'::regtype, 'regconfig'::regtype, 'regdictionary'::regtype, 'regcollation'::regtype
       ) $$,
    'no table has a column that pg_upgrade refuses: what it names is kept as a text'
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
select ok(
    (select count(*) <= 60 from relation as r where r.relkind = 'S'), 'there are at most 60 sequences: each takes 11 kB'
);
select is_empty(
    $$ select unnest(e.extcondition) as condition from pg_extension as e
       where e.extname = 'pgqueue' except select '' $$,
    'pg_dump takes every row'
);
select is_empty(
    $$ select t.tgname from pg_trigger as t join relation as r on r.oid = t.tgrelid
       -- For each row, after an update, by which upgrades have it fired.
       where (r.name, t.tgtype) <> ('access', 17) and t.tgname <> 'shard_steps_sequences' $$,
    'no table has a trigger that a restore would fire, but for one whose work a restore has to do again'
);
select is_empty(
    $$ select r.name from relation as r where r.relkind in ('r', 'p')
       and r.name not like 'run%' and (xpath('/row/n/text()', query_to_xml(
           format('select count(*) as n from pgqueue.%I', r.name), false, true, ''
       )))[1]::text <> case when r.name = 'access' then '5' else '0' end $$,
    'the install script seeds no row (access has the five of the grants above)'
);
select is_empty(
    $$ select c.conname from pg_constraint as c
       where c.connamespace = 'pgqueue'::regnamespace and c.conname ~ '\d$' $$,
    'every constraint has a name that was chosen'
);
select is_empty(
    -- Whatever a handler raises is the failure of its job.
    $$ select r.name from routine as r
       where r.prosrc ~* 'when\s+others' and r.name <> 'work'
           or r.name = 'work' and (select count(*) from regexp_matches(r.prosrc, 'when\s+others', 'gi')) <> 1 $$,
    'no function catches everything, but work around the call of a handler'
);
select is_empty(
    $$ select r.name from routine as r
       where r.prosrc ~* '\mexecute\M(?!'')' and r.name not in ('_change_access', 'work', '_step_sequences') $$,
    'no function runs dynamic SQL but one that grants, work, which calls handlers, and one that alters sequences'
);

select is_empty(
    $$ select r.name from routine as r
       where r.prosrc ~ '\mpg_advisory_(xact_)?lock' or r.prosrc ~* '\mlock table\M(?![^;]*\mnowait\M)'
           -- Who changes settings waits for others that do, and who skips numbers; only the owner can.
           and r.name not in ('_lock_settings', '_mark', 'after_failover') $$,
    'no function waits for a lock that any role may take'
);

-- What stands more than once, because a call would cost too much where it is hot.

create function pg_temp.written(pattern text)
    returns table (name text, text text)
    language sql
as $$
    select r.name, regexp_replace(regexp_replace(m.found[1], '\m\w+\.(job_ids|tokens|queue)\M', '\1', 'g'), '\s+', ' ', 'g')
    from pg_temp.routine as r
    cross join regexp_matches(r.prosrc, pattern, 'g') as m (found)
$$;

select results_eq(
    $$ select count(*), count(distinct w.text)
       from pg_temp.written('token = new_token,\s+?attempt.*?\s+?end\M') as w
       where w.name = 'claim' $$,
    'values (3::bigint, 1::bigint)', 'claim leases one job as it leases many'
);
select results_eq(
    $$ select count(*), count(distinct w.text)
       from pg_temp.written('\(j\.id, j\.token\) in \(\s*select h\.id, h\.token\s+from unnest\([^)]*\) as h \(id, token\)\s*\)\) is true') as w $$,
    'values (3::bigint, 1::bigint)', 'extend, complete_many and the other ends find what is held in the same way'
);
select results_eq(
    $$ select array_agg(w.name collate "default" order by w.name), count(distinct w.text)
       from pg_temp.written('\(\s*?pg_try_advisory_xact_lock_shared\(7366513.*?\) is not true') as w $$,
    $$ values (array['_wake', 'enqueue'], 1::bigint) $$, 'enqueue looks for parked workers as the others do'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r
       where strpos(r.prosrc, '(key & 15) * 2') > 0 and strpos(r.prosrc, '(key >> 4 & 15) * 2') > 0
       union all
       select array_agg(r.name collate "default" order by r.name) from routine as r where r.prosrc ~ '\* 2\M.*_cell_' $$,
    $$ values (array['_live_lanes', '_pick', '_pick_plain_groups', '_record']),
           (array['_live_lanes', '_noted_lanes', '_pick', '_pick_plain_groups', '_record']) $$,
    'a claim looks for the records of a lane as the others do'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r where r.prosrc ~ '736651[34]' $$,
    $$ values (array['_let_none_sleep', '_park', '_unpark', '_wake', 'emit', 'enqueue']) $$,
    'the numbers of the advisory locks are only in module wake, in enqueue and in emit'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r where r.prosrc ~ '7366515' $$,
    $$ values (array['_hold_off_claims', '_is_held_off']) $$, 'the number of the locks of who sets a limit is only in module cap'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r
       where r.prosrc ~ 'join pgqueue\.(job|event) as \w+\s+on \w+\.(id|name) ='
           and not exists (select from unnest(r.proconfig) as c where c = 'enable_hashjoin=off') $$,
    $$ values (array['rerun', 'status', 'why']) $$,
    'who joins jobs or events by id runs where hash joins are off, or for an operator: others would read all, as if the queue were short'
);
select results_eq(
    $$ select r.name collate "default" from routine as r where r.prosrc ~ '\mpg_notify\(' $$, $$ values ('_notify') $$,
    'whether a notification may be sent is decided in one place'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r where r.prosrc ~ '7366516' $$,
    $$ values (array['_await', '_stop_awaiting', '_tell_end']) $$,
    'the numbers of the locks of who waits for a job stand in modules status and wake'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r
       where r.prosrc ~ 'pgqueue\.(_count_ends|_tell_end)\(' $$,
    $$ values (array['_after_end']) $$, 'what follows an end stands in one function'
);
select results_eq(
    $$ select array_agg(r.name collate "default" order by r.name) from routine as r
       where r.prosrc ~ 'pgqueue\._return_permits\(' $$,
    $$ values (array['_after_end', 'complete', 'complete_many']) $$,
    'only the two quickest ends skip it, where nothing but permits is given back'
);
select results_eq(
    $$ select r.name collate "default", r.prosrc ~ 'pgqueue\._after_end\(' from routine as r
       where r.prosrc ~ 'delete from pgqueue\.job\M' order by 1 $$,
    -- One takes back what it has just enqueued, and the jobs of the other go on elsewhere.
    $$ values ('_begin_window', false), ('_departed', false), ('_end', true), ('complete', true), ('complete_many', true), ('purge', true) $$,
    'which every function that ends jobs calls'
);
select is_empty(
    $$ select r.name from routine as r where r.prosrc ~ '(^|[^E''])''[^''\n]*\\[^''\n]*''' $$,
    'a text with a backslash is the same with standard_conforming_strings = off'
);
select is_empty(
    $$ select r.name from routine as r
       where r.prosrc ~ ('hashtext(extended)?\((' || r.name || '\.)?(queue|kind|group_key|event|name|concat\([^()]*\))[,)]') and r.name <> '_found' $$,
    'no hash of an argument depends on the collation of what the caller passes'
);
select is_empty(
    $$ select r.name from routine as r where r.prosrc ~ 'paused -> ''''' and r.name not in ('_is_wanted', '_pause_of', '_found') $$,
    'which kinds and groups are paused is asked in one place, module match'
);
select is_empty(
    $$ select r.name
       from routine as r
       join pg_language as l on l.oid = r.prolang
       where l.lanname = 'sql' and r.name not in ('_is_over', 'version') and (not (r.provolatile = 'i' or r.provolatile = 's' and (r.proretset or r.name in ('_is_free', '_is_group_paused', '_is_wanted', '_start_of'))) or r.prosecdef or r.proisstrict or r.proconfig is not null) $$,
    'the planner can put functions in SQL in line'
);

-- The first literals after the name of an outcome, or of many.
select set_eq(
    $$ select l.found[1]
       from pg_temp.written('\m(?:outcomes?|status(?:es)?|known)\M(?: constant text\[\])?\s*(?:=|<>|<@|in|:=)\s*\(?(?:array\[)?((?:''\w+''(?:, )?)+)') as w
       cross join regexp_matches(w.text, '''(\w+)''', 'g') as l (found) $$,
    $$ select o.name from pgqueue._outcome as o where o.name is not null
       union all select o.asked_by from pgqueue._outcome as o where o.asked_by is not null
       union all select 'released' $$,
    'every outcome that a function asks for is in the list, and every one in the list is asked for'
);
select lives_ok(
    format(
        'select pgqueue.finish(array_fill(0::bigint, array[%1$s]), array_fill(0::bigint, array[%1$s]), %2$L)',
        count(o.asked_by), array_agg(o.asked_by) filter (where o.asked_by is not null)
    ),
    'finish takes each outcome in the list'
)
from pgqueue._outcome as o;

-- The row of a run, and the defaults: what a queue without settings does, beside one whose settings
-- say nothing.
create temporary table job_ended (how text, run pgqueue.run, max_attempts int, lease interval, extended interval);
create function pg_temp.end_jobs(queue text)
    returns void
    language plpgsql
as $$
declare
    claimed timestamptz := '2026-01-01 00:01 UTC';
    how text;
    added bigint;
    job pgqueue.job;
    extended interval;
begin
    foreach how in array array['complete', 'complete_many', 'fail'] loop
        added := pgqueue.enqueue(end_jobs.queue, kind => 'k');
        job := pgqueue.claim(end_jobs.queue, 'w');
        update pgqueue.job as j set lease_expires_at = clock_timestamp() where j.id = added;
        perform pgqueue.extend(array[job.id], array[job.token]);
        select date_trunc('second', j.lease_expires_at - clock_timestamp() + '0.5 s')
        into extended from pgqueue.job as j where j.id = added;
        update pgqueue.job as j set claimed_at = claimed, run_at = claimed - interval '7 s'
        where j.id = added;
        case how
            when 'complete' then perform pgqueue.complete(job.id, job.token);
            when 'complete_many' then perform pgqueue.complete_many(array[job.id], array[job.token]);
            else perform pgqueue.fail(job.id, job.token, 'why', permanent => true);
        end case;
        insert into job_ended
        select how, r, job.max_attempts, job.lease_expires_at - job.claimed_at, extended
        from pgqueue.run as r where r.job_id = added;
    end loop;
end;
$$;
truncate pgqueue.queue;
select pg_temp.end_jobs('copy');
select pgqueue.configure('another', keep_runs => 3);
select pg_temp.end_jobs('copy');
select results_eq(
    $$ select count(*), count(distinct (
           (e.run).slot, (e.run).attempt, (e.run).waited, (e.run).finished_at - (e.run).taken,
           (e.run).queue, (e.run).kind, (e.run).worker
       )) from job_ended as e $$,
    'values (6::bigint, 1::bigint)', 'complete, complete_many and the other ends write the same row of a run'
);
select is_empty(
    $$ select e.* from job_ended as e cross join pgqueue._in_force('copy'::text) as s
       where (e.max_attempts, e.lease, e.extended) is distinct from (s.max_attempts, s.lease, s.lease)
           or (e.run).slot <> (floor(extract(epoch from (e.run).finished_at) / 86400)::int + s.keep_runs) % 16 $$,
    'the defaults are those of _in_force, with and without settings of any queue'
);
select is_empty(
    $$ select o.description from pg_description as o
       cross join string_to_table(o.description, E'\n') as line
       where o.objoid in (select r.oid from routine as r union all select r.oid from relation as r)
           and length(line) > 80 $$,
    'every line of a comment fits a terminal'
);

select * from finish();
rollback;
