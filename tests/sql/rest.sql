-- rest: how long a worker may sleep.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(20);

\ir limits.psql

create function pg_temp.is_near(rest interval, target interval) returns boolean
    language sql as $$ select $1 between $2 - interval '10 s' and $2 $$;

select pgqueue.enqueue('a', run_at => clock_timestamp() + interval '3 hours', priority => 3);
select pgqueue.enqueue('a', run_at => clock_timestamp() + interval '2 hours', priority => -3);
select pgqueue.enqueue('b', run_at => clock_timestamp() + interval '1 hour', kind => 'k');
select ok(
    pg_temp.is_near(pgqueue.rest(array['a'], park => false), '2 hours'),
    'rest lasts until the next job of any priority is due'
);
select ok(
    pg_temp.is_near(pgqueue.rest(array['a', 'b', 'c'], park => false), '1 hour'),
    'rest lasts until the next job of any of its queues is due'
);
select ok(
    pg_temp.is_near(pgqueue.rest(array['a', 'b'], array['a'], false), '2 hours'),
    'rest on some kinds does not count jobs of others'
);
select pgqueue.pause('b');
select ok(
    pg_temp.is_near(pgqueue.rest(array['a', 'b'], park => false), '2 hours'),
    'rest does not count the jobs of a paused queue'
);
select pgqueue.enqueue('a');
select is(pgqueue.rest(array['a'], park => false), interval '0', 'rest returns zero when a job is due');
select count(*) from pgqueue.claim('a', 'w', 10, '30 minutes');
select ok(
    pg_temp.is_near(pgqueue.rest(array['a'], park => false), '30 minutes'),
    'rest lasts until the next lease expires'
);
select pgqueue.enqueue('old', run_at => now() - interval '1 hour');
select is(
    pgqueue.rest(array['old'], array['old'], false), interval '0', 'rest on some kinds counts what has long been due'
);
select count(*) from pgqueue.claim('old', 'w', 1, '30 minutes');
select ok(
    pg_temp.is_near(pgqueue.rest(array['old'], array['old'], false), '30 minutes'),
    'rest on some kinds lasts until the lease of a job that was due long ago expires'
);
update pgqueue.job set lease_expires_at = now() - interval '1 s' where token is not null;
select is(
    pgqueue.rest(array['a'], park => false), interval '0', 'rest returns zero when a lease has expired'
);


-- What lost its ticket is found by a worker that is alone
set local pgqueue.lose_hints = 1;
select pgqueue.enqueue('lost', group_key => 'group ' || n) from generate_series(1, 60) as n;
select is_empty($$ select from pgqueue.ticket where queue = 'lost' $$, 'a ticket may get lost');
select ok(
    pgqueue.rest(array['lost'], park => false) <= '1 s', 'a worker whose groups have lost their tickets rests briefly'
);
-- Each rest sweeps for at most 20 ms, which on a busy machine may not be enough for all.
do $$
begin
    for attempt in 1 .. 20 loop
        exit when (select count(*) from pgqueue.ticket where queue = 'lost') = 60;
        perform setval('pgqueue._cell_groups_due', 1);
        assert pgqueue.rest(array['lost'], park => false) <= '1 s', 'it rests briefly until all have one';
    end loop;
end;
$$;
select is(
    (select count(*) from pgqueue.ticket where queue = 'lost'), 60::bigint, 'its rest has given them new ones'
);
select pgqueue.configure('capped', kind => 'k', max_running => 3);
select pgqueue.enqueue_many('capped', '{1,2,3,4}', kind => 'k');
select count(*) from pgqueue.claim('capped', 'w', 2);
select count(*) from pgqueue.claim('capped', 'w', 2);
select pgqueue.configure('capped', kind => 'k', max_running => 2);
select count(*) from (
    select array_agg(id) as ids, array_agg(token) as tokens from pgqueue.job where queue = 'capped' and token is not null
) as j, pgqueue.complete_many(j.ids, j.tokens);
select ok(
    pgqueue.rest(array['capped'], park => false) <= '1 s',
    'a worker rests briefly where nobody was told that the jobs beyond a lowered cap have ended'
);

select pgqueue.enqueue('waits', kind => 'other', group_key => 'g');
select pgqueue.enqueue('waits', kind => 'k', group_key => 'g', after => array[pgqueue.enqueue('first')]);
select is(
    pg_temp.rested('waits', array['k']), null,
    'a worker of one kind rests until it is notified while what there is of it in a group waits for another job'
);
select pgqueue.enqueue('waits', kind => 'k', group_key => 'g', run_at => clock_timestamp() + interval '1 hour');
select ok(
    pg_temp.is_near(pg_temp.rested('waits', array['k']), '1 hour'), 'or until there is another one'
);

select pgqueue.enqueue('after', after => array[pgqueue.enqueue('after')]);
select pgqueue._look_around(clock_timestamp() - interval '1 minute', 10);
select ok(
    pg_sequence_last_value('pgqueue._cell_due') <= pgqueue._since_2020(clock_timestamp() + interval '1 second'),
    'a look at loose ends that has waited for the machine does not put off the next one for long'
);

-- Many idle workers sweep no more than one
select pgqueue.enqueue('many', group_key => 'group ' || n) from generate_series(1, 600) as n;
select pgqueue.pause('many');
set local track_functions = 'pl';
-- How many groups, 25 at a time, a rest looks at.
create function pg_temp.swept() returns bigint
    language plpgsql
as $$
declare
    before bigint := coalesce(pg_stat_get_xact_function_calls('pgqueue._sweep_some'::regproc), 0);
begin
    perform pgqueue.rest(array['many'], park => false);
    return pg_stat_get_xact_function_calls('pgqueue._sweep_some'::regproc) - before;
end;
$$;
select setval('pgqueue._cell_groups_due', 1);
select cmp_ok(pg_temp.swept(), '>', 0::bigint, 'a rest sweeps some of many groups');
select is(pg_temp.swept(), 0::bigint, 'and the next one, of any session, leaves them alone');
select is(pgqueue.rest(array['many'], park => false), interval '1 second', 'but rests briefly');
select setval('pgqueue._cell_groups_due', 1);
select cmp_ok(pg_temp.swept(), '>', 0::bigint, 'when it is time, a rest goes on with them');
select setval('pgqueue._cell_groups_due', 1);

select * from finish();
rollback;
