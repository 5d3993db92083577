-- Tickets: which groups have jobs to run, and when a claim looks at them. What two sessions do at
-- once is in test_races.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(110);

\ir limits.psql

-- The payloads of the claimed jobs, in the order of the claim.
create function pg_temp.claimed(queue text, jobs int, kinds text[] default null) returns text
    language sql
as $$
    select pg_temp.commit();
    select coalesce(string_agg(c.payload #>> '{}', ' '), '') from pgqueue.claim($1, 'w', $2, kinds => $3) as c
$$;
-- The tickets of a queue, in the order in which they are looked at.
create function pg_temp.tickets(queue text) returns text
    language sql
as $$
    select coalesce(string_agg(
        t.group_key || case
            when t.is_full then ' full'
            when t.is_blocked then ' blocked'
            when t.at > clock_timestamp() + interval '1 minute' then ' later'
            else ''
        end, ', ' order by t.at
    ), 'none')
    from pgqueue.ticket as t where t.queue = $1
$$;
-- One job for each name, in the group that is its first letter.
create function pg_temp.fill(queue text, names text) returns void
    language sql
as $$
    select count(pgqueue.enqueue($1, to_jsonb(n.name), group_key => left(n.name, 1), kind => 'k'))
    from string_to_table($2, ' ') as n (name)
$$;
-- Lets a claim look at all tickets of a queue, also in lanes where no job is left, as if they had just been listed.
create function pg_temp.make_due(queue text) returns void
    language sql
as $$
    update pgqueue.ticket as t set at = clock_timestamp() - interval '1 second' where t.queue = $1;
    select pgqueue._note_lanes($1, array_agg(distinct 1000 + t.priority), clock_timestamp() - interval '1 second')
    from pgqueue.ticket as t
    where t.queue = $1
    having count(*) > 0;
$$;
-- From the first group.
create function pg_temp.sweep(most int default 1000) returns int
    language sql
as $$
    select setval('pgqueue._cell_groups_swept', -9223372036854775808);
    select pgqueue._sweep_groups($1)
$$;

-- Who enqueues

select pgqueue.enqueue('in');
select is(pg_temp.tickets('in'), 'none', 'a job without a group has no ticket');
select pg_temp.fill('in', 'a1 a2 b1 a3');
select is(pg_temp.tickets('in'), 'a, b', 'the first job of a group brings its ticket');
select pgqueue.enqueue('in', group_key => 'a', priority => 3);
select results_eq(
    $$ select group_key, priority from pgqueue.ticket where queue = 'in' order by at $$,
    $$ values ('a', 0), ('b', 0), ('a', 3) $$, 'a group has a ticket for each of its priorities'
);
select pgqueue.enqueue('in', group_key => 'b', run_at => '2100-01-01');
select is(pg_temp.tickets('in'), 'a, b, a', 'a job for later brings none where there is one for earlier');
select pgqueue.enqueue('in later', group_key => 'a', run_at => '2100-01-01');
select is(
    (select at from pgqueue.ticket where queue = 'in later'), '2100-01-01', 'the ticket of a scheduled job says when it is due'
);
select pgqueue.enqueue('in later', group_key => 'a');
select is(pg_temp.tickets('in later'), 'a, a later', 'one that is due before it brings another');
select pgqueue.enqueue_many('in many', array_fill('{}'::jsonb, array[6]), group_keys => array['b', 'a', null, 'b', 'c', 'a']);
select is(pg_temp.tickets('in many'), 'b, a, c', 'enqueue_many brings one for each group, in the order of their first jobs');
select is(
    (select count(distinct at) from pgqueue.ticket where queue = 'in many'), 3::bigint, 'no two of them at the same time'
);
select pgqueue.enqueue('in wait') as first \gset
select pgqueue.enqueue('in wait', group_key => 'a', after => array[:first]);
select is(pg_temp.tickets('in wait'), 'none', 'a job that waits for another has no ticket');
select pgqueue.complete(id, token) from pgqueue.claim('in wait', 'w');
select is(pg_temp.tickets('in wait'), 'a', 'until that has ended');

-- How a claim leaves them

select pg_temp.fill('gone', 'a1 b1');
select is(pg_temp.claimed('gone', 1), 'a1', 'a claim takes the job of the first ticket');
select is(pg_temp.tickets('gone'), 'b, a', 'and does not look whether there is more, if it has enough');
select is(pg_temp.claimed('gone', 5), 'b1', 'a claim that wants more takes the next');
select is(pg_temp.tickets('gone'), 'none', 'groups that have nothing left have no ticket');

select pg_temp.fill('later', 'a1');
select pgqueue.enqueue('later', group_key => 'a', run_at => '2100-01-01');
select pgqueue.enqueue('later', group_key => 'a', run_at => '2099-01-01');
select is(pg_temp.claimed('later', 5), 'a1', 'a claim takes what is due');
select is(
    (select array_agg(at) from pgqueue.ticket where queue = 'later'), array['2099-01-01'::timestamptz],
    'a group that has something for later has a ticket for then'
);

select pg_temp.fill('tail', 'a1 a2 b1 b2');
select is(pg_temp.claimed('tail', 1), 'a1', 'a claim takes one job of a group that has more');
select is(pg_temp.tickets('tail'), 'b, a', 'its ticket goes to the end');
select is(pg_temp.claimed('tail', 2), 'a2 b1', 'a claim of as many as there are groups takes one of each');
select is(pg_temp.tickets('tail'), 'b, a', 'and their tickets go to the end, in their order');

select pg_temp.fill('short', 'a1 a2 a3 b1 b2 b3');
select is(pg_temp.claimed('short', 3), 'a1 a2 b1', 'a claim that has enough before the turn of a group is over takes a part');
select results_eq(
    $$ select group_key, served from pgqueue.ticket where queue = 'short' order by at $$,
    $$ values ('b', 1), ('a', 0) $$, 'the ticket of that group stays where it was, and knows how many it has given'
);

select pgqueue.configure('full', group_limit => 1);
select pg_temp.fill('full', 'a1 a2 b1');
select is(pg_temp.claimed('full', 5), 'a1 b1', 'a claim takes one job of each group that has a limit of 1');
select is(pg_temp.tickets('full'), 'a full', 'a group that is full and has more has a ticket that says so');
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'full'), '{running,blocked,running}',
    'so its jobs are shown as blocked'
);
update pgqueue.ticket set at = clock_timestamp() - interval '2 minutes' where queue = 'full';
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'full'), '{running,blocked,running}',
    'also when nobody has looked again for a while, as long as the other runs'
);
select pg_temp.complete('full', 'a1');
select is(pg_temp.tickets('full'), 'a', 'until one of its jobs has ended');
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'full'), '{ready,running}', 'then they are ready'
);
select is(pg_temp.claimed('full', 5), 'a2', 'and a claim takes the next at once');
select is(pg_temp.tickets('full'), 'none', 'after the last one there is no ticket');

select pgqueue.configure('two', group_limit => 2);
select pg_temp.fill('two', 'a1 a2 a3');
select is(pg_temp.claimed('two', 1), 'a1', 'a claim takes one of a group of two');
select is(pg_temp.tickets('two'), 'a', 'which is not full');
select is(pg_temp.claimed('two', 5), 'a2', 'the next claim takes another');
select is(pg_temp.tickets('two'), 'a full', 'now it is');

select pgqueue.configure('rate', group_key => '*', rate_limit => 1, rate_period => '1 hour');
select pg_temp.fill('rate', 'a1 a2');
select is(pg_temp.claimed('rate', 5), 'a1', 'a claim takes as many jobs of a group as its rate says');
select pg_temp.make_due('rate');
select is(pg_temp.claimed('rate', 5), '', 'and the next none');
select is(pg_temp.tickets('rate'), 'a full', 'a group at its rate counts as full');
select ok(
    (select at - clock_timestamp() between '59 minutes' and '1 hour' from pgqueue.ticket where queue = 'rate'),
    'until just when it may begin another'
);
select is((select state from pgqueue.jobs where queue = 'rate' and worker is null), 'blocked', 'until then its job is blocked');
update pgqueue.ticket set at = clock_timestamp() where queue = 'rate';
select is((select state from pgqueue.jobs where queue = 'rate' and worker is null), 'ready', 'and then ready');
select is((select ready from pgqueue.queues where queue = 'rate'), 1::bigint, 'as queues counts it');

select pgqueue.configure('retry', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('retry', 'a1 a2');
select pg_temp.claimed('retry', 1);
select pgqueue.fail(id, token, 'e', '1 hour') from pgqueue.job where queue = 'retry' and token is not null;
select is(pg_temp.claimed('retry', 5), '', 'a group may wait for a retry');
update pgqueue.ticket set at = clock_timestamp() - interval '2 minutes' where queue = 'retry';
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'retry'), '{scheduled,blocked}',
    'its other jobs are blocked by that'
);
update pgqueue.job set run_at = clock_timestamp() where queue = 'retry';
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'retry'), '{ready,ready}',
    'until the retry is due, even if no claim has looked again'
);
select is((select ready from pgqueue.queues where queue = 'retry'), 2::bigint, 'as queues counts them');

-- Paused, and pauses between two looks that grow

select pg_temp.fill('halt', 'a1 b1');
select pgqueue.pause('halt', group_key => 'a');
select is(pg_temp.claimed('halt', 5), 'b1', 'a claim passes over a paused group');
select is(pg_temp.tickets('halt'), 'a blocked', 'which is blocked, but not full');
create function pg_temp.pauses(queue text, looks int) returns numeric[]
    language plpgsql
as $$
declare
    pauses numeric[] := '{}';
    began timestamptz;
begin
    for n in 1 .. looks loop
        perform pg_temp.make_due(queue);
        began := clock_timestamp();
        perform pg_temp.claimed(queue, 5);
        pauses := pauses || (
            -- From some moment of the claim on, however long it took.
            select p.pause
            from pgqueue.ticket as t
            join (values (0.1), (0.4), (1.6), (6.4), (10.0)) as p (pause)
                on t.at - p.pause * interval '1 s' between began and clock_timestamp()
            where t.queue = pauses.queue
        );
    end loop;
    return pauses;
end;
$$;
update pgqueue.ticket set served = 0 where queue = 'halt';
select is(
    pg_temp.pauses('halt', 6), '{0.1,0.4,1.6,6.4,10.0,10.0}'::numeric[],
    'nobody looks at it for longer each time, up to 10 seconds'
);
select ok(pg_temp.rests_until('halt', pg_temp.first_lease('halt')), 'who rests waits for no paused group');
select pgqueue.resume('halt', group_key => 'a');
select is(pg_temp.claimed('halt', 5), 'a1', 'a group that is resumed is served at once');

select pg_temp.fill('kinds', 'a1 b1');
select pgqueue.enqueue('kinds', '"b2"', kind => 'other', group_key => 'b');
select is(pg_temp.claimed('kinds', 5, '{other}'), 'b2', 'a claim of a kind takes what it finds of it');
select is(pg_temp.tickets('kinds'), 'a, b', 'and leaves the tickets to others');
select is(pg_temp.claimed('kinds', 5), 'a1 b1', 'who take the rest');

-- What comes back

select pgqueue.enqueue('back', '"a1"', group_key => 'a', run_at => '2100-01-01') as id \gset
select pgqueue.run_now(:id);
select is(pg_temp.tickets('back'), 'a, a later', 'run_now brings a ticket');
select is(pg_temp.claimed('back', 5), 'a1', 'and the job runs');
select pg_temp.make_due('back'), pg_temp.claimed('back', 5);
select is(pg_temp.tickets('back'), 'none', 'that of its former time goes when it has come');
select pgqueue.release(array[id], array[token]) from pgqueue.job where id = :id;
select is(pg_temp.tickets('back'), 'a', 'a job that is released brings a ticket');
select token from pgqueue.claim('back', 'w') \gset
select pgqueue.fail(:id, :token, 'e', '1 hour');
select is(pg_temp.claimed('back', 5), '', 'one that failed waits for its retry');
select is(pg_temp.tickets('back'), 'a later', 'and so does its ticket');
select pgqueue.reprioritize(:id, 4);
select results_eq(
    $$ select priority from pgqueue.ticket where queue = 'back' order by priority $$, 'values (0), (4)',
    'one that gets another priority brings a ticket there'
);
select is(pgqueue.cancel(:id), 'cancelled', 'a job that is cancelled');
select pg_temp.make_due('back');
select is(pg_temp.claimed('back', 5), '', 'leaves its tickets');
select is(pg_temp.tickets('back'), 'none', 'and a claim drops them');

-- Copies, as two sessions make them that do not see each other

select pg_temp.fill('copies', 'a1 a2 a3 a4 a5 a6 b1');
insert into pgqueue.ticket (at, priority, queue, group_key)
select at, priority, queue, group_key from pgqueue.ticket where queue = 'copies' and group_key = 'a';
select setval('pgqueue._cell_groups_due', (extract(epoch from clock_timestamp()) - 1577836800 + 1)::bigint * 1000000);
select is(pg_temp.claimed('copies', 4), 'a1 a2 a3 b1', 'a claim that meets two tickets of a group takes as many jobs as it wants');
select is(pg_temp.claimed('copies', 4), 'a4 a5 a6', 'and the next the rest');
select pgqueue.configure('copies full', group_limit => 3);
select pg_temp.fill('copies full', 'a1 a2 a3 a4 a5 a6');
insert into pgqueue.ticket (at, priority, queue, group_key)
select at, priority, queue, group_key from pgqueue.ticket where queue = 'copies full';
select is(pg_temp.claimed('copies full', 2), 'a1 a2', 'also where the group has a limit');
select is(
    (select count(*) from pgqueue.permit where queue = 'copies full' and token > 0), 2::bigint, 'each takes one permit'
);
select is(pg_temp.claimed('copies full', 5), 'a3', 'and the next claim takes what the limit leaves');

-- One transaction: who claims and enqueues
select pg_temp.fill('again', 'a1 a2 a3');
select pg_temp.claimed('again', 1);
select pg_temp.fill('again', 'a4 a5');
select is(pg_temp.tickets('again'), 'a', 'a ticket that a claim has put to its end is seen by who enqueues');

-- The sweep

truncate pgqueue.job, pgqueue.ticket;
select pg_temp.fill('sweep', 'a1 b1 c1 d1');
select pgqueue.enqueue('sweep', group_key => 'b', priority => 2);
select pgqueue.enqueue('sweep', group_key => 'e', run_at => '2100-01-01');
select pgqueue.enqueue('sweep', group_key => 'f', after => array_agg(id)) from pgqueue.job where payload = '"a1"';
select is(pg_temp.sweep(), 0, 'a sweep has nothing to do where every group has its ticket');
delete from pgqueue.ticket where group_key in ('b', 'c', 'e');
select is(pg_temp.sweep(), 4, 'it gives a ticket to every group and priority that has something to run and none');
select is(
    (select string_agg(concat(group_key, priority, case when at > now() + interval '1 day' then ' later' end), ' ' order by group_key, priority) from pgqueue.ticket),
    'a0 b0 b2 c0 d0 e0 later', 'one for later to those that have something for later, and none to those that wait for others'
);
insert into pgqueue.ticket (at, priority, queue, group_key)
select at + interval '1 minute', priority, queue, group_key from pgqueue.ticket where group_key in ('a', 'c');
select is(pg_temp.sweep(), 0, 'it gives none to groups that have two');
select is(
    (select count(*) from pgqueue.ticket where group_key in ('a', 'c') and at <= clock_timestamp()), 2::bigint,
    'and leaves the first of these'
);
select is((select count(*) from pgqueue.ticket where group_key in ('a', 'c')), 2::bigint, 'alone');
update pgqueue.ticket set is_blocked = true, at = now() + interval '10 seconds' where group_key = 'a';
select is(pg_temp.sweep(), 0, 'it gives none to a group that is blocked');
delete from pgqueue.ticket where group_key = 'd';
select pgqueue.claim('sweep', 'w', 5, lease => '1 hour');
update pgqueue.job set token = 1, lease_expires_at = now() + interval '1 minute' where group_key = 'd';
select is(pg_temp.sweep(), 0, 'none to one whose only job runs');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where group_key = 'd';
select is(pg_temp.sweep(), 1, 'but one when the lease of that has expired');
select is(pg_temp.claimed('sweep', 5), 'd1', 'so that the next claim recovers it');

truncate pgqueue.job, pgqueue.ticket;
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload, group_key)
select now(), now(), 0, 20, 'many', 'k', '{}', 'g' || n from generate_series(1, 1000) as n;
select pg_temp.sweep(400) as given \gset
select ok(:given between 300 and 400, 'a sweep of 400 gives up to 400 groups a ticket');
select is(
    (select sum(pgqueue._sweep_groups(400 + 0 * n)) from generate_series(1, 5) as n), 1000::bigint - :given,
    'the next ones go on where it ended, to the last group, and then from the first'
);
select is((select count(distinct group_key) from pgqueue.ticket), 1000::bigint, 'all have one');
select is((select count(*) from pgqueue.ticket), 1000::bigint, 'and none has two');
delete from pgqueue.ticket where group_key = 'g500';
select setval('pgqueue._cell_groups_swept', -9223372036854775808);
select is(
    (select done from pgqueue.maintain() where task = 'sweep groups'), 1::bigint, 'maintain sweeps 1000'
);
truncate pgqueue.ticket;
select setval('pgqueue._cell_groups_swept', -9223372036854775808), setval('pgqueue._cell_groups_due', 1);
select pg_temp.claimed('many', 1);
select ok((select count(*) between 40 and 50 from pgqueue.ticket), 'a claim that sweeps looks at up to 50 groups');
truncate pgqueue.ticket;
select pg_temp.claimed('many', 1);
select is((select count(*) from pgqueue.ticket), 0::bigint, 'and none does so within 50 ms after it');
select setval('pgqueue._cell_groups_due', 9223372036854775807);
select pg_temp.claimed('many', 1);
select ok((select count(*) between 40 and 50 from pgqueue.ticket), 'where another clock said when, the next claim does');

-- Cells: the lanes of groups in the list of a queue, and the position among their tickets

truncate pgqueue.job, pgqueue.ticket;
select pgqueue._note_lanes('cells', '{0,1000,1005}', clock_timestamp());
select results_eq(
    $$ select l.lane from unnest(pgqueue._noted_lanes('cells', clock_timestamp())) as l (lane) order by l.lane $$,
    'values (0), (1000), (1005)', 'the list of the lanes of a queue has room for those of groups'
);
select pgqueue._note_lanes('cells', '{0}', clock_timestamp());
select is(pgqueue._noted_lanes('cells', clock_timestamp()), '{0}', 'and says where there are none');
select pg_temp.fill('cells', 'a1');
select is(pg_temp.claimed('cells', 5), 'a1', 'a group that comes while such a list is valid is served at once');
select pgqueue.enqueue('cells', '"a2"', group_key => 'a', priority => -7);
select is(pg_temp.claimed('cells', 5), 'a2', 'and so is one at another priority');
select count(*) from pgqueue.enqueue_many(
    'position', array_fill('{}'::jsonb, array[600]), group_keys => array(select 'g' || n from generate_series(1, 600) as n)
);
select is((select count(*) from pgqueue.claim('position', 'w', 590)), 590::bigint, 'a claim takes jobs of 590 groups');
select is((select count(*) from pgqueue.claim('position', 'w', 5)), 5::bigint, 'and the next of five');
select isnt(
    (pgqueue._position(hashtextextended('position', 1000), clock_timestamp())).reached, null,
    'one that has walked over many tickets that are gone leaves its position'
);
select is((select count(*) from pgqueue.claim('position', 'w', 5)), 5::bigint, 'the next goes on there');
insert into pgqueue.ticket (at, priority, queue, group_key) values (now() - interval '1 hour', 0, 'position', 'behind');
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload, group_key)
values (now() - interval '1 hour', now(), 0, 20, 'position', 'k', '"behind"', 'behind');
select is(pg_temp.claimed('position', 5), 'behind', 'and one that finds none looks at those behind it');

-- Groups without jobs

truncate pgqueue.job, pgqueue.ticket;
select pg_temp.fill('idle', 'a1 b1');
select pgqueue.enqueue('idle', '"c1"', group_key => 'c', run_at => '2100-01-01');
select pgqueue.enqueue('idle', '"d1"', group_key => 'd', run_at => '2100-01-01');
select pgqueue.cancel(id) from pgqueue.job where payload in ('"b1"', '"c1"');
select is((select count(*) from pgqueue.ticket), 4::bigint, 'a job that is cancelled leaves its ticket behind');
select is(
    (select done from pgqueue.maintain() where task = 'drop tickets'), 2::bigint, 'maintain drops those of groups without jobs'
);
select results_eq(
    'select group_key from pgqueue.ticket order by group_key', $$ values ('a'), ('d') $$, 'and no others, due or not'
);
select pgqueue.enqueue_many(
    'idle', array_fill('1'::jsonb, array[5000]), group_keys => array_agg('g ' || n)
) from generate_series(1, 5000) as n;
select pgqueue.purge('idle');
select ok(done between 1 and 1500, 'in each call on a few pages') from pgqueue.maintain() where task = 'drop tickets';

-- All hints lost

truncate pgqueue.job, pgqueue.ticket;
set local pgqueue.lose_hints = '1';
select pgqueue.configure('lost', group_limit => 1);
select pg_temp.fill('lost', 'a1 a2 b1');
select pgqueue.enqueue_many('lost', array['"c1"', '"c2"']::jsonb[], group_keys => '{c,c}');
select is(pg_temp.tickets('lost'), 'none', 'with lose_hints an enqueue leaves no ticket');
create function pg_temp.found(queue text) returns text
    language plpgsql
as $$
declare
    found_jobs text;
begin
    perform pg_temp.sweep();
    select pg_temp.claimed(found.queue, 5) into found_jobs;
    return found_jobs;
end;
$$;
select is(pg_temp.found('lost'), 'a1 b1 c1', 'the sweep finds all groups, and a claim takes a job of each');
select pg_temp.complete('lost', 'a1'), pg_temp.complete('lost', 'c1');
select is(pg_temp.tickets('lost'), 'a full, c full', 'what has ended tells nobody');
select pg_temp.make_due('lost');
select is(pg_temp.found('lost'), 'a2 c2', 'and claims look again after a while');
select is(
    (select pgqueue.fail(id, token, 'e', '0') from pgqueue.job where payload = '"b1"'), 'retry', 'a job of a group fails'
);
select pgqueue.release(array[id], array[token]) from pgqueue.job where payload = '"c2"';
select is(pg_temp.found('lost'), 'c2 b1', 'what failed and what was released is found');
update pgqueue.job set lease_expires_at = now() - interval '1 second';
select is(pg_temp.found('lost'), 'a2 c2 b1', 'and so is what has an expired lease');
set local pgqueue.lose_hints = '';
select pg_temp.fill('lost', 'd1');
select is(pg_temp.claimed('lost', 5), 'd1', 'without lose_hints no hint is lost');

-- Tickets that a session had locked, and that it left as they were.
select pg_temp.fill('touched', 'a1 b1');
create function pg_temp.touch_and_resume() returns void language plpgsql as $$
begin
    begin
        perform from pgqueue.ticket as t where t.queue = 'touched' for update;
        raise sqlstate 'PQ000';
    exception when sqlstate 'PQ000' then
        null;
    end;
    perform pgqueue.resume('touched');
end;
$$;
select pg_temp.touch_and_resume() from generate_series(1, 4);
select is(
    (select count(*) from pgqueue.ticket where queue = 'touched'), 2 * (1 + 4)::bigint,
    'each change of settings gives such a group one more ticket, however many it has'
);
select is(pg_temp.claimed('touched', 5), 'a1 b1', 'and a claim takes each job once');

select * from finish();
rollback;
