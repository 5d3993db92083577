-- Settings: what configure sets, for one queue or for all, and what pause and resume stop and start.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(12);

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
       from pgqueue._settings('s'::text) as s $$,
    $$ values (interval '1 minute', 7, interval '2 s', interval '10 s', 7, true, false) $$,
    'a setting stays until it is set again; unset, it is that of all queues, else the default'
);
select pgqueue.configure('s', max_attempts => 3, reset => true);
select results_eq(
    $$ select s.lease, s.max_attempts, s.retry_base from pgqueue._settings('s'::text) as s $$,
    $$ values (interval '9 s', 3, interval '5 s') $$,
    'configure with reset forgets the settings made before'
);

select * from finish();
rollback;
