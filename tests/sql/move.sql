-- Module move: what belongs to a key leaves one shard and arrives at another. Both are this database here.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(24);

select pgqueue.enqueue('q', '{"n": 1}', group_key => 'a', priority => 5, run_at => now() - interval '1 hour');
select pgqueue.enqueue('q', '{"n": 2}', group_key => 'a', headers => '{"h": 1}', expires_at => now() + interval '1 day');
select pgqueue.enqueue('q', '{"n": 3}', unique_key => 'u');
select pgqueue.enqueue('q', '{"n": 4}');
select pgqueue.enqueue('q', '{"n": 5}', group_key => 'c');
select pgqueue.schedule('nightly', 'q', '@daily');

select is_empty('select from pgqueue._misplaced(0, 1)', 'with one shard everything is where it belongs');
select set_eq(
    $$ select m.kind, m.queue, m.key, m.place from pgqueue._misplaced(1000000, 2) as m $$,
    $$ values ('group', 'q', 'a', pgqueue.shard_of('a', 2)), ('group', 'q', 'c', pgqueue.shard_of('c', 2)),
           ('unique', 'q', 'u', pgqueue.shard_of('u', 2)), ('schedule', 'q', 'nightly', pgqueue.shard_of('nightly', 2)) $$,
    'groups, unique keys and schedules have a place, and a job without a key has none'
);

create temporary table before as select to_jsonb(j) as job from pgqueue.job as j where j.group_key = 'a';
create temporary table left_here as select d.* from pgqueue._depart('group', 'q', 'a') as d;
select is(l.state, 'free', 'a group that waits may go') from left_here as l;
select is(jsonb_array_length(l.parts), 2, 'with all its jobs') from left_here as l;
select throws_like(
    'select pgqueue._expect(l.parts) from left_here as l', 'job % is on both shards',
    'what another shard has under the same id is not expected'
);
-- From here on this is the other shard.
delete from pgqueue.job where group_key = 'a';
select pgqueue._expect(l.parts) from left_here as l;
select is((select count(*) from pgqueue.jobs where group_key = 'a'), 0::bigint, 'what is expected is not there yet');
select pgqueue._departed('{}', '{}');
select is((select count(*) from pgqueue.moving where content is not null), 2::bigint, 'what is written down stays until it arrives');
select pgqueue._arrive(array_agg(m.what), array_agg(m.key)) from pgqueue.moving as m;
select set_eq($$ select to_jsonb(j) from pgqueue.job as j where j.group_key = 'a' $$, 'select job from before', 'it arrives as it was');
select is_empty('select from pgqueue.moving', 'and is written down no more');
select is(
    array(select (c).payload ->> 'n' from (select pgqueue.claim('q', 'w', 9, kinds => array['q'])) as c (c) where (c).group_key = 'a'),
    array['1', '2'], 'and can be claimed, in its order'
);
select is((select d.state from pgqueue._depart('group', 'q', 'a') as d), 'busy', 'a group that runs stays');
select is((select d.parts from pgqueue._depart('schedule', 'q', 'nightly') as d) #>> '{0,content,cron}', '@daily', 'a schedule goes as a whole');

-- A key that is taken where it arrives.
select pgqueue.enqueue('r', '{"n": 7}', unique_key => 'u');
create temporary table keyed as select d.parts from pgqueue._depart('unique', 'r', 'u') as d;
select pgqueue._departed(array_agg(p.what), array_agg(p.key))
from keyed as k
cross join lateral jsonb_to_recordset(k.parts) as p (what text, key text);
delete from pgqueue.moving;
select pgqueue._expect(k.parts) from keyed as k;
select pgqueue.enqueue('r', '{"n": 8}', unique_key => 'u');
select pgqueue._arrive(array['job'], array[(select m.key from pgqueue.moving as m)]);
select set_eq(
    $$ select (j.payload ->> 'n')::int, j.unique_key from pgqueue.job as j where j.queue = 'r' $$,
    $$ values (7, null), (8, 'u') $$, 'no job is lost to another with its key'
);

-- What is tied to others.
select pgqueue.enqueue('t', group_key => 'tied', after => array[pgqueue.enqueue('t', group_key => 'first')]);
select is((select d.state from pgqueue._depart('group', 't', 'tied') as d), 'tied', 'a job that waits for others stays');
select is((select d.state from pgqueue._depart('group', 't', 'first') as d), 'tied', 'and so does one that others wait for');
select pgqueue.enqueue('t', group_key => 'of a batch', batch_id => pgqueue.create_batch('t'));
select is((select d.state from pgqueue._depart('group', 't', 'of a batch') as d), 'tied', 'and one of a batch');

-- Dead jobs go along.
select pgqueue.enqueue('d', group_key => 'g');
select pgqueue.fail(c.id, c.token, 'e', permanent => true) from pgqueue.claim('d', 'w') as c;
select is(d.parts #>> '{0,what}', 'dead_job', 'dead jobs go with their group') from pgqueue._depart('group', 'd', 'g') as d;

-- Held while it is busy.
select pgqueue._pause_group('q', 'a');
select is((select q.paused from pgqueue.queue as q where q.group_key = 'a'), true, 'a busy group is given no more jobs');
select pgqueue.pause('q', group_key => 'c');
select pgqueue._pause_group('q', 'c');
select pgqueue.pause('r');
select pgqueue.resume('r', group_key => 'd');
select pgqueue.pause('r', 'k', 'd');
create temp table said as select q.* from pgqueue.queue as q where q.name = 'r';
select pgqueue._pause_group('r', 'd');
select is((pgqueue._in_force('r', '', 'd')).paused, true, 'also one that was resumed');
select pgqueue._resume_groups('r', 'd');
select set_eq(
    $$ select q.* from pgqueue.queue as q where q.name = 'r' $$, $$ select s.* from said as s $$,
    'of which what was said before is in force again'
);
select is((select q.paused from pgqueue.queue as q where q.group_key = 'a'), true, 'while others stay paused');
select pgqueue._resume_groups();
select is_empty($$ select from pgqueue.queue as q where q.group_key = 'a' $$, 'until it has moved, or could not');
select is((select q.paused from pgqueue.queue as q where q.group_key = 'c'), true, 'and what an operator has paused stays so');

select setval('pgqueue.used_seq', 0);
select pgqueue.schedule('moves', 'q', '* * * * *');
create temporary table moves as select to_jsonb(s) as content from pgqueue.schedule as s where s.name = 'moves';
delete from pgqueue.schedule where name = 'moves';
select setval('pgqueue.used_seq', 0);
insert into pgqueue.moving (what, key, content) select 'schedule', 'moves', m.content from moves as m;
select pgqueue._arrive('{schedule}', '{moves}');
select ok((select last_value < 0 from pgqueue.used_seq), 'claims look for schedules where one has arrived');

select * from finish();
rollback;
