-- Settings: what configure sets, for one queue or for all, and what pause and resume stop and start.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(76);

\ir limits.psql

-- Pause and resume

select pgqueue.enqueue('pa'), pgqueue.enqueue('pb');
select pgqueue.pause('pa');
select is_empty($$ select pgqueue.claim('pa', 'w') $$, 'a claim of a paused queue returns no job');
select lives_ok($$ select pgqueue.enqueue('pa') $$, 'a paused queue accepts jobs');
select is((select paused from pgqueue.queues where queue = 'pa'), true, 'the view queues shows a pause');
select isnt_empty($$ select pgqueue.claim('pb', 'w') $$, 'a pause of one queue leaves the others');
select pgqueue.enqueue('pb');
select pgqueue.pause();
select is_empty($$ select pgqueue.claim('pb', 'w') $$, 'pause without a name pauses every queue');
select pgqueue.resume('pa');
select isnt_empty(
    $$ select pgqueue.claim('pa', 'w') $$, 'one queue can be resumed while all others are paused'
);
select pgqueue.pause('pb');
select pgqueue.resume();
select isnt_empty(
    $$ select pgqueue.claim('pb', 'w') $$, 'resume without a name resumes every queue, also one paused by name'
);
select throws_ok(b.call, '22023', null, format('an empty name does not mean every queue: %s', b.call))
from (values ('select pgqueue.pause('''')'), ('select pgqueue.resume('''')')) as b (call);
select pgqueue.pause('no such queue');
select pgqueue.resume('no such queue');
select is_empty(
    $$ select * from pgqueue.queues where queue = 'no such queue' $$,
    'a queue that was paused and resumed and has nothing else is not shown'
);

-- Configure

select pgqueue.configure('s', lease => '1 minute', max_attempts => 7);
select pgqueue.configure('s', retry_base => '2 s');
select pgqueue.configure(null, retry_cap => '10 s', lease => '9 s');
select results_eq(
    $$ select s.lease, s.max_attempts, s.retry_base, s.retry_cap, s.keep_runs, s.notify, s.paused
       from pgqueue._in_force('s') as s $$,
    $$ values (interval '1 minute', 7, interval '2 s', interval '10 s', 7, true, false) $$,
    'a setting stays until it is set again; unset, it is that of all queues, else the default'
);
select pgqueue.configure('s', max_attempts => 3, reset => true);
select results_eq(
    $$ select s.lease, s.max_attempts, s.retry_base from pgqueue._in_force('s') as s $$,
    $$ values (interval '9 s', 3, interval '5 s') $$,
    'configure with reset forgets the settings made before'
);

select pgqueue.configure('s', reset => true);
select is_empty(
    $$ select from pgqueue.queue where name = 's' $$, 'of a queue for which nothing is set no row is kept'
);
-- Planned while there was hardly a row.
select pgqueue.configure('many', group_key => 'g1', lease => '1 s');
insert into pgqueue.queue (name, group_key, lease)
select q.name, 'g' || n, q.lease from pgqueue.queue as q, generate_series(2, 3000) as n where q.name = 'many';
create temporary table seen as select pg_stat_get_xact_tuples_returned('pgqueue.queue'::regclass) as rows;
select pgqueue.configure('many', group_key => 'g7', lease => '2 s');
select pgqueue.configure('many', group_key => 'g8', reset => true);
select ok(
    pg_stat_get_xact_tuples_returned('pgqueue.queue'::regclass) - rows < 10, 'configure reads only what it writes'
) from seen;
select pgqueue.pause('many', group_key => 'g' || n) from generate_series(3000, 3009) as n;
select pgqueue.pause('many');
select is(
    (select count(*) from pgqueue.queue where name = 'many'), 3000::bigint,
    'a pause of a queue leaves no row for groups that have nothing else set'
);
select pgqueue.resume('many');

-- The list of settings

select set_eq(
    $$ select a.attname::text, format_type(a.atttypid, a.atttypmod) from pg_attribute as a
       where a.attrelid = 'pgqueue.queue'::regclass and a.attnum > 3 and not a.attisdropped $$,
    $$ select s.name, s.type::regtype::text from pgqueue._setting as s $$, 'the list of settings has every column'
);
select set_eq(
    -- The name of a function is kept, not its oid, which a dump would not.
    $$ select a.name, case a.type when 'regprocedure'::regtype then 'text' else format_type(a.type, null) end
       from pg_proc as p, unnest(p.proargnames, p.proargtypes) as a (name, type)
       where p.oid = 'pgqueue.configure'::regproc and a.name not in ('queue', 'kind', 'group_key', 'reset') $$,
    $$ select s.name, s.type::regtype::text from pgqueue._setting as s where s.name <> 'paused' $$,
    'and every argument of configure, but for its scope'
);
create function public.told(jsonb) returns void language sql as '';
-- Its least value, or that which is not the default.
create temporary table told as
select s.name, case when s.type = 'boolean' then (not s.fallback::boolean)::text
    when s.name = 'handler' then 'public.told(jsonb)' else s.range[1] end as value
from pgqueue._setting as s
where s.name <> 'paused' and 'less than all' <> all (coalesce(s.not_for, '{}'));
create function pg_temp.tell(name text, value text) returns void language plpgsql as $$
begin
    execute format('select pgqueue.configure(''told %1$s'', %1$I => %2$L)', name, value);
end;
$$;
select pg_temp.tell(t.name, t.value) from told as t;
select results_eq(
    $$ select s.setting, s.value from pgqueue.settings as s
       where s.queue = 'told ' || s.setting and s.set_for = 'queue' order by s.setting $$,
    $$ select t.name, to_jsonb(jsonb_populate_record(null::pgqueue.queue, jsonb_build_object(t.name, t.value)))
           ->> t.name from told as t order by t.name $$,
    'configure sets each of them'
);
select is_empty(
    $$ select s.queue, s.setting from pgqueue.settings as s
       where s.queue like 'told %' and s.queue <> 'told ' || s.setting and s.set_for = 'queue' $$,
    'and no other'
);

select lives_ok(
    $$ select pgqueue.configure(
           'years', retry_base => '365 days', retry_cap => '366 days', age_after => '1 year', keep_dead => '3650 days',
           wait_target => '365 days', suspend_target => '365 days'
       ) $$,
    'a year can be given in days'
);
create function pg_temp.kept(style text) returns interval[] language plpgsql as $$
begin
    perform set_config('intervalstyle', style, true);
    perform pgqueue.configure('style ' || style, lease => '2 days -00:00:00.000001', keep_dead => '1 year 1 mon -1 day');
    perform pgqueue.configure('style ' || style, max_attempts => 3);
    return (select array[q.lease, q.keep_dead] from pgqueue.queue as q where q.name = 'style ' || style);
end;
$$;
select results_eq(
    $$ select to_char(k[1], 'DD HH24:MI:SS.US'), to_char(k[2], 'YYYY MM DD')
       from unnest('{postgres,postgres_verbose,sql_standard,iso_8601}'::text[]) as s (style), pg_temp.kept(s.style) as k $$,
    $$ select to_char(interval '2 days -00:00:00.000001', 'DD HH24:MI:SS.US'),
           to_char(interval '1 year 1 mon -1 day', 'YYYY MM DD') from generate_series(1, 4) $$,
    'an interval stays what it is, in whichever style a session writes it'
);
set local intervalstyle = postgres;

-- Settings by kind and group

-- Each row in its own value, narrowest last: what is left when the narrowest is taken away.
create function pg_temp.leases()
    returns text
    language plpgsql
as $$
declare
    winners text := '';
    row_id tid;
begin
    for row_id in
        select q.ctid from pgqueue.queue as q where q.lease is not null order by q.lease desc
    loop
        winners := winners || ' '
            || extract(epoch from (pgqueue._in_force('p', 'k', 'g')).lease);
        delete from pgqueue.queue as q where q.ctid = row_id;
        perform pgqueue._resolve('');
    end loop;
    return winners || ' ' || extract(epoch from (pgqueue._in_force('p', 'k', 'g')).lease);
end;
$$;
truncate pgqueue.queue;
select pgqueue.configure(null, lease => '1 s');
select pgqueue.configure('p', lease => '2 s');
select pgqueue.configure(null, kind => 'k', lease => '3 s');
select pgqueue.configure('p', kind => 'k', lease => '4 s');
select pgqueue.configure(null, group_key => 'g', lease => '5 s');
select pgqueue.configure('p', group_key => 'g', lease => '6 s');
select pgqueue.configure(null, kind => 'k', group_key => 'g', lease => '7 s');
select pgqueue.configure('p', kind => 'k', group_key => 'g', lease => '8 s');
select results_eq(
    $$ select (pgqueue._in_force(s.queue, s.kind, s.group_key)).lease
       from (values
           ('o', 'l', 'h'), ('p', 'l', 'h'), ('o', 'k', 'h'), ('p', 'k', null),
           ('o', 'l', 'g'), ('p', 'l', 'g'), ('o', 'k', 'g'), ('p', 'k', 'g')
       ) as s (queue, kind, group_key) $$,
    $$ select n * interval '1 s' from generate_series(1, 8) as n $$,
    'a setting of a group comes before one of a kind, a queue and all, and one of a queue before one of all'
);
select is(
    pg_temp.leases(), ' 8.000000 7.000000 6.000000 5.000000 4.000000 3.000000 2.000000 1.000000 30.000000',
    'without the narrowest setting the next one holds'
);
select pgqueue.configure('p', kind => 'k', max_attempts => 4, retry_base => '0', retry_cap => '3 s');
select pgqueue.configure('p', group_key => 'g', max_attempts => 5, weight => 9, max_payload_bytes => 30);
select results_eq(
    $$ select s.max_attempts, s.retry_cap, s.weight, s.keep_runs from pgqueue._in_force('p', 'k', 'g') as s $$,
    $$ values (5, interval '3 s', 9, 7) $$, 'the narrower wins for each setting by itself'
);
create temporary table given (how text, id bigint);
insert into given values
    ('one', pgqueue.enqueue('p', kind => 'k')),
    ('one', pgqueue.enqueue('p', kind => 'k', group_key => 'g')),
    ('one', pgqueue.enqueue('p', kind => 'l')),
    ('one', pgqueue.enqueue('p', kind => 'k', max_attempts => 2));
insert into given select 'many', pgqueue.enqueue_many('p', '{1,2,3}', kind => 'k', group_keys => '{g,null,h}');
insert into given
select 'keyed', pgqueue.enqueue_many(
    'p', '{1,2,3}', kind => 'k', group_keys => '{g,null,h}', unique_keys => '{x,y,z}'
);
select is(
    (select array_agg(j.max_attempts order by j.id) from given as g join pgqueue.job as j using (id) where g.how = e.how),
    e.max_attempts, 'a job has the max_attempts of its kind and group: enqueue ' || e.how
)
from (values ('one', '{4,5,20,2}'::int[]), ('many', '{5,4,4}'), ('keyed', '{5,4,4}')) as e (how, max_attempts);
select throws_ok(
    f.call, '54000', null, 'a payload may not be larger than max_payload_bytes of its group: ' || f.call
)
from (values
    ($$ select pgqueue.enqueue('p', to_jsonb(repeat('x', 50)), group_key => 'g') $$),
    ($$ select pgqueue.enqueue_many('p', array['1', to_jsonb(repeat('x', 50))]::jsonb[], group_keys => '{h,g}') $$)
) as f (call);
select lives_ok(
    $$ select pgqueue.enqueue_many('p', array['1', to_jsonb(repeat('x', 50))]::jsonb[], group_keys => '{g,h}') $$,
    'the payload of another group may be larger'
);

select pgqueue.configure('ends', keep_runs => 0);
select pgqueue.configure('ends', kind => 'k', keep_runs => 1, lease => '2 min', retry_base => '9 min', retry_cap => '9 min');
select pgqueue.configure('ends', group_key => 'g', lease => '3 min');
select pgqueue.enqueue('ends', kind => j.kind, group_key => j.group_key)
from (values ('k', null), ('l', null), ('l', 'g'), ('k', 'g')) as j (kind, group_key);
create temporary table held as select * from pgqueue.claim('ends', 'w', 4);
select results_eq(
    'select kind, group_key, lease_expires_at - claimed_at from held order by id',
    $$ values ('k', null, interval '2 min'), ('l', null, '30 s'), ('l', 'g', '3 min'), ('k', 'g', '3 min') $$,
    'a claim leases each job as its kind and group say'
);
update pgqueue.job as j set lease_expires_at = j.claimed_at + interval '1 s' where j.queue = 'ends';
select pgqueue.extend(array(select id from held), array(select token from held));
select results_eq(
    $$ select date_trunc('minute', lease_expires_at - clock_timestamp() + '1 s') from pgqueue.job
       where queue = 'ends' order by id $$,
    $$ values (interval '2 min'), ('0 min'), ('3 min'), ('3 min') $$, 'and so does extend'
);
select pgqueue.fail(id, token, 'why') from held where group_key is null;
select results_eq(
    $$ select kind, run_at > clock_timestamp() + '4 min' from pgqueue.job
       where queue = 'ends' and token is null order by id $$,
    $$ values ('k', true), ('l', false) $$, 'a retry waits as the kind says'
);
select pgqueue.complete(id, token) from held where kind = 'k' and group_key is not null;
select pgqueue.complete_many(array[id], array[token]) from held where kind = 'l' and group_key is not null;
select results_eq(
    $$ select kind, outcome from pgqueue.run where queue = 'ends' order by outcome $$,
    $$ values ('k', 'completed'), ('k', 'retry') $$, 'runs are kept for the days that the kind says'
);
select is(
    (select lease_expires_at - claimed_at from pgqueue.claim('p', 'w', lease => '7 s', kinds => '{k}')),
    interval '7 s', 'the lease given to claim overrides the setting of a kind'
);

select pgqueue.configure('ends', kind => 'k', reset => true);
select is_empty(
    $$ select * from pgqueue.settings where queue = 'ends' and kind = 'k' $$,
    'configure with reset forgets the settings of one kind'
);
select isnt_empty(
    $$ select * from pgqueue.settings where queue = 'ends' and group_key = 'g' and setting = 'lease' $$,
    'and leaves those of the groups'
);

-- Weights

truncate pgqueue.queue, pgqueue.job;
select pgqueue.configure('w', group_key => 'heavy', weight => 3);
select pgqueue.enqueue_many('w', array_fill('1'::jsonb, array[40]), group_keys => array_fill('light'::text, array[40]));
select pgqueue.enqueue_many('w', array_fill('1'::jsonb, array[20]), group_keys => array_fill('heavy'::text, array[20]));
select pgqueue.enqueue('w', group_key => 'heavy') from generate_series(1, 20);
select ok(
    (select count(*) filter (where group_key = 'heavy') between 29 and 31 from pgqueue.claim('w', 'w', 40)),
    'of a group of weight 3 three jobs are served for each one of a group of weight 1'
);

-- Pause by kind and group

create function pg_temp.taken(queue text, kinds text[] default null)
    returns text
    language sql
as $$
    select coalesce(string_agg(c.payload #>> '{}', ' ' order by c.payload #>> '{}'), '')
    from (
        select * from pgqueue.claim(taken.queue, 'w', 100, kinds => taken.kinds)
    ) as c,
    lateral pgqueue.release(array[c.id], array[c.token])
$$;
truncate pgqueue.queue, pgqueue.job;
select pgqueue.enqueue('n', to_jsonb(j.name), kind => j.kind, group_key => j.group_key)
from (values ('a', 'a', null), ('ag', 'a', 'g'), ('ah', 'a', 'h'), ('b', 'b', null), ('bg', 'b', 'g'))
    as j (name, kind, group_key);
select pgqueue.enqueue('n', '"later"', kind => 'a', run_at => clock_timestamp() + '1 hour');
select is(pg_temp.taken('n'), 'a ag ah b bg', 'nothing is paused');
select pgqueue.pause('n', kind => 'a');
select is(pg_temp.taken('n'), 'b bg', 'a paused kind gives no job out');
select is(pg_temp.taken('n', '{a}'), '', 'also not to a claim that names it');
select is(pg_temp.taken('n', '{b}'), 'b bg', 'a claim that names another kind is as before');
select is(
    (select count(*) from pgqueue.claim_from(array['n'], 'w', 9) as c, pgqueue.release(array[c.id], array[c.token])),
    2::bigint, 'claim_from passes over a paused kind'
);
select lives_ok($$ select pgqueue.enqueue('n', '"new"', kind => 'a') $$, 'a paused kind takes jobs in');
select is(pg_temp.rested('n', '{a}'), null, 'a worker that waits only for a paused kind may sleep');
select is(pgqueue.rest(array['n'], park => false), interval '0', 'and one that also waits for others may not');
select pgqueue.resume('n', kind => 'a');
select is(pg_temp.taken('n'), 'a ag ah b bg new', 'resume lets the next claim find all of them');
select ok(
    pgqueue.rest(array['n'], park => false) is not distinct from interval '0', 'and rest knows of them'
);
select pgqueue.pause('n', group_key => 'g');
select is(pg_temp.taken('n'), 'a ah b new', 'a paused group gives no job out');
select pgqueue.pause('n', kind => 'b');
select is(pg_temp.taken('n'), 'a ah new', 'a group and a kind can both be paused');
select pgqueue.resume('n', group_key => 'g');
select is(pg_temp.taken('n'), 'a ag ah new', 'to resume a group does not resume a kind');
select pgqueue.resume('n');
select is(pg_temp.taken('n'), 'a ag ah b bg new', 'to resume a queue resumes what was paused within');
select pgqueue.pause('n', 'a', 'g');
select is(pg_temp.taken('n'), 'a ah b bg new', 'one kind of one group can be paused');
select pgqueue.pause('n');
select is(pg_temp.taken('n'), '', 'a paused queue gives no job out');
select pgqueue.resume('n', kind => 'b');
select is(pg_temp.taken('n'), 'b bg', 'one kind of a paused queue can be resumed');
select pgqueue.pause('n', group_key => 'g');
select is(pg_temp.taken('n'), 'b', 'a group comes before a kind');
select pgqueue.resume('n', 'a', 'g');
select is(pg_temp.taken('n'), 'ag b', 'and a kind of a group before both');
select pgqueue.pause('n');
select is(pg_temp.taken('n'), '', 'to pause a queue overrules what was resumed within');
select pgqueue.resume();
select is_empty('select from pgqueue.queue', 'to resume all leaves no trace');
select pgqueue.pause(kind => 'a');
select is(pg_temp.taken('n'), 'b bg', 'a kind can be paused in every queue');
select pgqueue.resume('n', 'a');
select is(pg_temp.taken('n'), 'a ag ah b bg new', 'and resumed in one');
select pgqueue.resume(kind => 'a');
select pgqueue.resume('n', group_key => 'g');
select is_empty('select from pgqueue.queue', 'to resume what is not paused says nothing');

-- Future and depth

select pgqueue.pause('f', kind => 'a');
select pgqueue.enqueue('f', kind => 'a', run_at => clock_timestamp() + '1 hour');
select pgqueue.enqueue('f', kind => 'b', run_at => clock_timestamp() + '2 hours');
select cmp_ok(
    pg_temp.rested('f'), '>', interval '119 min', 'rest does not wait for a paused kind'
);
select pgqueue.enqueue_many('deep', array_fill('"a"'::jsonb, array[5000]), kind => 'a');
select pgqueue.enqueue('deep', '"b"', kind => 'b');
select pgqueue.pause('deep', kind => 'a');
select is(pg_temp.taken('deep'), 'b', 'a claim finds the job behind 5,000 of a paused kind')
from generate_series(1, 3);
select pgqueue.enqueue('deep', '"c"', kind => 'c');
select is(pg_temp.taken('deep', '{c}'), 'c', 'also for a claim of kinds');
select pgqueue.resume('deep', kind => 'a');
select is(
    (select count(*) from pgqueue.claim('deep', 'w', 5001)), 5001::bigint,
    'and the first claim after resume finds them all'
);
select pgqueue.enqueue_many('rounds', array_fill('"g"'::jsonb, array[3000]), group_keys => array_fill('g'::text, array[3000]));
select pgqueue.enqueue('rounds', '"h"', group_key => 'h');
select pgqueue.pause('rounds', group_key => 'g');
select is(pg_temp.taken('rounds'), 'h', 'a claim finds the job of another group behind 3,000')
from generate_series(1, 3);
select pgqueue.resume('rounds', group_key => 'g');
select is(
    (select count(*) from pgqueue.claim('rounds', 'w', 3001)), 3001::bigint,
    'and the first claim after resume finds those of the group'
);

select pgqueue.enqueue_many(
    'fair', array_fill('1'::jsonb, array[100]), group_keys => array_fill(g.name, array[100])
)
from (values ('g'), ('h')) as g (name);
select count(*) from pgqueue.claim('fair', 'w', 20);
select pgqueue.pause('fair', group_key => 'g');
select count(*) from pgqueue.claim('fair', 'w', 40);
select pgqueue.resume('fair', group_key => 'g');
select ok(
    (select count(*) filter (where group_key = 'g') between 9 and 11 from pgqueue.claim('fair', 'w', 20)),
    'a group that was paused is served beside the others again, and not before them'
);

-- The view

truncate pgqueue.queue;
select results_eq(
    'select count(*), count(distinct setting), min(set_for) from pgqueue.settings',
    $$ select count(*), count(*), 'default' from pgqueue._setting $$, 'settings shows the defaults where nothing was set'
);
select pgqueue.configure('p', lease => '1 min', weight => 2);
select pgqueue.configure(null, kind => 'k', retry_cap => '1 min');
select pgqueue.configure('p', kind => 'k', max_attempts => 3);
select pgqueue.pause('p', 'k', 'g');
select results_eq(
    $$ select setting, value, set_for from pgqueue.settings
       where queue = 'p' and kind = 'k' and group_key = 'g' and set_for <> 'default' $$,
    $$ values ('lease', '00:01:00', 'queue'), ('max_attempts', '3', 'kind'),
           ('paused', 'true', 'kind and group'), ('retry_cap', '00:01:00', 'kind in all queues'),
           ('weight', '2', 'queue') $$,
    'settings says what is in force and where it was set'
);
select is_empty(
    $$ select v.setting, v.value, e.value
       from pgqueue.settings as v
       cross join lateral (
           select coalesce(
               to_jsonb(pgqueue._in_force(v.queue, v.kind, v.group_key)) ->> v.setting,
               (
                   select pgqueue._seldom(coalesce(v.queue, ''), s.name, coalesce(v.kind, ''))
                   from pgqueue._setting as s where s.name = v.setting and s.is_seldom
               )
           )
       ) as e (value)
       where v.value is distinct from e.value $$,
    'settings shows what _in_force says'
);

select * from finish();
rollback;
