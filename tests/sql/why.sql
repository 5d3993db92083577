-- why: what keeps a job from running, or how it ended.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(78);

set datestyle = 'SQL, DMY';
set timezone = 'Asia/Kolkata';
create function pg_temp.why(job_id bigint)
    returns text
    language sql
as $$ select regexp_replace(pgqueue.why($1), '\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:30', 'TIME', 'g') $$;
create function pg_temp.id(queue text)
    returns bigint
    language sql
as $$ select min(j.id) from pgqueue.job as j where j.queue = $1 $$;

select pgqueue.enqueue('w', run_at => '2100-01-01 00:00 UTC') as id \gset
select is(
    pgqueue.why(:id), 'scheduled for 2100-01-01 05:30:00+05:30',
    'why tells the time of a scheduled job in the time zone of the session, whatever its DateStyle'
);
select pgqueue.pause('w');
select is(
    pg_temp.why(:id), 'scheduled for TIME; its queue is paused',
    'why tells the time of a scheduled job in a paused queue, too'
);
select pgqueue.enqueue('w') as ready \gset
select is(pg_temp.why(:ready), 'its queue is paused', 'why describes a ready job that its queue is paused');
select pgqueue.resume('w');
select is(
    pg_temp.why(:ready), 'ready: next in its queue; no worker has claimed from it, as far as the log remembers',
    'why describes a ready job in a queue from which nobody ever claimed'
);
select pgqueue.configure('w', keep_runs => 0);
select is(
    pg_temp.why(:ready), 'ready: next in its queue', 'why tells nothing of claims where no runs are kept'
);
select pgqueue.configure('w', reset => true);
select pgqueue.enqueue('w') as second \gset
select pgqueue.enqueue('w', priority => 5) as urgent \gset
select pgqueue.enqueue('w', priority => 5, run_at => '2100-01-01');
select id as running, token from pgqueue.claim('w', 'w3') \gset
select is(:running::bigint, :urgent::bigint, 'the job of the highest priority runs first');
select is(
    pg_temp.why(:running), 'runs: attempt 1 of 20, leased to w3 until TIME', 'why tells who runs a job, and until when'
);
select is(pg_temp.why(:ready), 'ready: next in its queue', 'a job that runs is not in front of another');
select is(
    pg_temp.why(:second), 'ready: waits behind 1 job of higher priority or earlier turn in its queue',
    'why counts a job that was enqueued before'
);
select pgqueue.enqueue_many('w', array_fill('{}'::jsonb, array[3209]), priority => 1);
select pgqueue.enqueue('w', group_key => 'g', run_at => now() - interval '1 minute');
select pgqueue.enqueue('w', group_key => 'g');
select is(
    pg_temp.why(:second), 'ready: waits behind 3,210 jobs of higher priority or earlier turn in its queue, in turn with groups',
    'why counts the jobs of higher priority, but not those of groups that have been due for longer'
);
select pgqueue.enqueue_many('w', array_fill('{}'::jsonb, array[7000]), priority => 2);
select is(
    pg_temp.why(:second), 'ready: waits behind more than 10,000 jobs of higher priority or earlier turn in its queue, in turn with groups',
    'why stops counting at 10,000'
);
update pgqueue.job set claimed_at = claimed_at - interval '11 minutes' where id = :running;
select is(
    pg_temp.why(:ready),
    'ready: waits behind more than 10,000 jobs of higher priority or earlier turn in its queue, in turn with groups; '
    'no worker has claimed from it for 10 minutes',
    'why says when the last job that was claimed has run for ten minutes'
);
select pgqueue.cancel(:running, 'reason');
select is(
    pg_temp.why(:running), 'its worker w3 was asked to stop at TIME: cancelling', 'why describes a job that is being cancelled'
);
select pgqueue.release(array[:running], array[:token]);
select is(pg_temp.why(:running), 'cancelled at TIME: reason', 'why says when and why a job was cancelled');
select pgqueue.cancel(:second);
select is(pg_temp.why(:second), 'cancelled at TIME', 'why says when a job was cancelled without a reason');
update pgqueue.run set finished_at = finished_at - interval '11 minutes' where queue = 'w';
select matches(
    pg_temp.why(:ready), '; no worker has claimed from it for 10 minutes$',
    'why says when the last job of a queue that any worker held has ended ten minutes ago'
);
update pgqueue.job set run_at = 'infinity' where id = :ready;
select matches(pgqueue.why(:ready), '^blocked: its wait is over', 'why says that a job is blocked, and nothing holds it up');

select pgqueue.configure('full', group_limit => 2, group_on_retry => 'block');
select pgqueue.enqueue_many('full', array_fill('{}'::jsonb, array[3]), group_keys => '{invoice 7,invoice 7,invoice 7}');
-- As if it had committed: nobody takes a permit that his own transaction has made.
update pgqueue.permit set token = -1 where token < 0;
select id as first, token from pgqueue.claim('full', 'w3') \gset
select id as waits from pgqueue.job where queue = 'full' order by id desc limit 1 \gset
select is(
    pg_temp.why(:waits), 'ready: waits behind 1 job of higher priority or earlier turn in its queue',
    'why tells nothing of a group that is not full'
);
select count(*) from pgqueue.claim('full', 'w4');
select is(
    pg_temp.why(:waits), format('its group invoice 7 is busy with job %s, leased to w3 until TIME, and 1 more', :first),
    'why tells which job keeps a full group busy'
);
select pgqueue.fail(:first, :token, 'e', '1 hour');
select is(
    pg_temp.why(:waits), format('its group invoice 7 waits for the retry of job %s at TIME, and 1 more', :first),
    'why tells for whose retry a group waits'
);
select pgqueue.run_now(:first);
select is(
    pg_temp.why(:waits), format('its group invoice 7 waits for the retry of job %s, due since TIME, and 1 more', :first),
    'also once that retry is due: it takes the permit that it has kept'
);
select pgqueue.configure('full', max_running => 1);
update pgqueue.permit set token = -1 where token < 0;
select is(
    pg_temp.why(:waits), format(
        'its group invoice 7 waits for the retry of job %s, due since TIME, and 1 more: its queue runs as many jobs as it may, 1', :first
    ),
    'and what keeps that one'
);
select pgqueue.configure('full', reset => true, group_limit => 2, group_on_retry => 'block');
update pgqueue.job set kind = 'other' where id = :first;
select pgqueue.pause('full', kind => 'other');
select matches(
    pg_temp.why(:waits), ' waits for the retry of job .*, due since TIME, and 1 more: its kind is paused$', 'such as its pause'
);
select pgqueue.resume('full', kind => 'other');
select pgqueue.rest(array['full'], array['full']);
select matches(
    pg_temp.why(:waits), ' waits for the retry of job .*: no worker takes its kind: the workers of its queue take others$',
    'or that nobody takes it'
);
update pgqueue.job set kind = queue where id = :first;
select matches(pg_temp.why(:first), '^ready: waits behind 1 job', 'which the group is not too busy for');
select pgqueue.enqueue('full', group_key => 'invoice 7', priority => 1) as later \gset
update pgqueue.job set run_at = now() - interval '1 hour' where id = :waits;
select matches(pg_temp.why(:first), '^ready: waits behind', 'nor does the retry wait for jobs that come before it');
select pgqueue.pause('full', group_key => 'invoice 7');
select is(pg_temp.why(:waits), 'its group is paused', 'why says that its group is paused');
select pgqueue.pause('full', kind => 'full');
select pgqueue.resume('full', group_key => 'invoice 7');
select pgqueue.pause(null, kind => 'full', group_key => 'invoice 7');
select is(
    pg_temp.why(:waits), 'its kind and group are paused together', 'why names the narrowest pause, which overrides the others'
);
select pgqueue.resume('full', 'full', 'invoice 7');
select alike(pg_temp.why(:waits), 'its group invoice 7 waits %', 'so that resuming it is enough, also if it was set for all queues');
select pgqueue.resume(null, 'full', 'invoice 7');
select pgqueue.pause('full');
select pgqueue.resume('full', kind => 'full');
select pgqueue.pause('full', group_key => 'invoice 7');
select is(pg_temp.why(:waits), 'its group is paused', 'and not a queue that is paused but for its kind');
select pgqueue.resume('full', group_key => 'invoice 7');
select alike(pg_temp.why(:waits), 'its group invoice 7 waits %', 'so that its queue may stay paused');
select pgqueue.resume('full');
select pgqueue.pause('x', kind => 'x');
select pgqueue.enqueue('x') as id \gset
select is(pg_temp.why(:id), 'its kind is paused', 'why says that its kind is paused');
select pgqueue.resume('x', kind => 'x');
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.release(array[:id], array[:token], '2100-01-01 00:00 UTC');
select is(pg_temp.why(:id), 'scheduled for TIME', 'why tells until when a job was snoozed');
select pgqueue.run_now(:id);
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.finish(array[:id], array[:token], '{release}', array[E'no handler\nhere'], '{1 hour}');
select is(
    pg_temp.why(:id), 'scheduled for TIME; put off by w3: no handler',
    'why tells which worker has put a job off, and why'
);
select pgqueue.run_now(:id);
select is(
    pg_temp.why(:id), 'ready: next in its queue; put off by w3: no handler',
    'why says so, too, once the job is due again'
);
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.fail(:id, :token, E'TimeoutError: slow
Traceback', '1 hour');
select is(
    pg_temp.why(:id), 'waits for its retry at TIME after attempt 1 of 20: TimeoutError: slow',
    'why tells until when a job waits for its retry, and the first line of the error'
);
select pgqueue.run_now(:id);
select is(pg_temp.why(:id), 'ready: next in its queue', 'a retry that is due is ready');
select token from pgqueue.claim('x', 'w3') \gset
update pgqueue.job set lease_expires_at = now() where id = :id;
select is(
    pg_temp.why(:id), 'its lease expired at TIME: the next claim recovers it (worker w3)',
    'why says that a lease has expired'
);
select pgqueue.pause();
select is(
    pg_temp.why(:id), 'its lease expired at TIME: the next maintain() recovers it (worker w3)',
    'why says that no claim recovers a job of a paused queue'
);
select pgqueue.resume();
update pgqueue.job set max_attempts = 2 where id = :id;
select is(
    pg_temp.why(:id), 'its lease expired at TIME: the next claim moves it to dead_job (worker w3)',
    'why says what happens to a job whose lease expired in its last attempt'
);
update pgqueue.job set cancelled_at = now() where id = :id;
select is(
    pg_temp.why(:id), 'its lease expired at TIME: the next claim cancels it (worker w3)',
    'why says what happens to a job whose lease expired after it was cancelled'
);
update pgqueue.job set cancelled_at = null where id = :id;
select pgqueue.fail(:id, :token, E'ValueError: bad
Traceback');
select is(
    pg_temp.why(:id), format('dead since TIME: ValueError: bad; redrive_job(%s) sends it back', :id),
    'why tells since when a job is dead, and how it comes back'
);
select pgqueue.discard(:id);
select is(
    pg_temp.why(:id), 'gone; its attempt 2 failed at TIME: ValueError: bad',
    'why says what is known of a job that was discarded'
);
select pgqueue.enqueue('x') as id \gset
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.fail(:id, :token, 'e', '0');
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.complete(:id, :token, '"secret"');
select is(pg_temp.why(:id), 'completed at TIME on attempt 2', 'why says when a job completed');
select pgqueue.enqueue('last');
select pgqueue.enqueue('x', run_at => now() + interval '1 hour', expires_at => now() + interval '1 day') as ends \gset
select is(
    pg_temp.why(:ends), 'scheduled for TIME; expires at TIME if it is not begun by then',
    'why tells until when a job may begin'
);
update pgqueue.job set attempt = 1, terms.expires_at = now() where id = :ends;
select is(
    pg_temp.why(:ends), 'expired at TIME, not begun again by then: the next maintain() cancels it',
    'why says that no claim comes across a job before it is due'
);
select pgqueue.run_now(:ends);
select is(
    pg_temp.why(:ends), 'expired at TIME, not begun again by then: the next claim or maintain() cancels it',
    'why says that it may not begin any more'
);
select pgqueue.pause('x');
select is(
    pg_temp.why(:ends), 'expired at TIME, not begun again by then: the next maintain() cancels it',
    'and that no claim looks at it where it is paused'
);
select pgqueue.resume('x');
select pgqueue.reap();
select is(
    regexp_replace(pg_temp.why(:ends), '[^ ]* [^ ]* UTC', 'TIME UTC'), 'cancelled at TIME: expired at TIME UTC',
    'and then that this was why it was cancelled'
);
select pgqueue.enqueue('both', expires_at => now() + interval '1 day') as both \gset
select pgqueue.claim('both', 'w3');
update pgqueue.job set lease_expires_at = now(), terms.expires_at = now() where id = :both;
select pgqueue.claim('both', 'w3');
select matches(
    pg_temp.why(:both), '^cancelled at', 'why says what came last, where a claim met both a lease and a job that had expired'
);
-- A limit that was lowered

select pgqueue.configure('lowered', group_limit => 2, group_on_retry => 'block');
select pgqueue.enqueue_many('lowered', array_fill('{}'::jsonb, array[3]), group_keys => '{g,g,g}');
update pgqueue.permit set token = -1 where token < 0;
select pgqueue.fail(id, token, 'e', '0') from pgqueue.claim('lowered', 'w', 2);
select pgqueue.configure('lowered', group_limit => 1);
select p.job_id as kept from pgqueue.permit as p where p.queue = 'lowered' and p.place = 1 \gset
select is(
    (select array_agg(pg_temp.why(j.id) order by j.id) from pgqueue.job as j where j.queue = 'lowered' and j.id <> :kept),
    array[
        format('its group g waits for the retry of job %s, due since TIME', :kept),
        format('its group g waits for the retry of job %s, due since TIME, and 1 more', :kept)
    ],
    'why names the retry whose permit still counts, also for the other one'
);

-- Paused jobs are ahead of none

select pgqueue.pause('past', kind => 'a');
select pgqueue.pause(null, group_key => 'g');
select pgqueue.enqueue_many('past', array_fill('{}'::jsonb, array[3]), kind => 'a');
select pgqueue.enqueue('past', group_key => 'g', priority => 5);
select pgqueue.enqueue('past') as first \gset
select pgqueue.enqueue('past') as second \gset
select alike(pg_temp.why(:first), 'ready: next in its queue%', 'why counts no paused jobs as ahead');
select alike(pg_temp.why(:second), 'ready: waits behind 1 job of %', 'but those that run first');
select pgqueue.enqueue_many('past', array_fill('{}'::jsonb, array[9998]), kind => 'a', priority => 1);
select alike(
    pg_temp.why(:second),
    'ready: waits behind more than 10,000 jobs of higher priority or earlier turn in its queue, some of them paused%',
    'if there are more than it looks at, it says that some are paused'
);
select pgqueue.resume(null, group_key => 'g');

-- What claims pass over

select pgqueue.configure('day', rate_limit => 1, rate_period => '1 day');
select pgqueue.enqueue_many('day', array_fill('{}'::jsonb, array[2]));
update pgqueue.permit set token = -1 where token < 0;
select id as lost from pgqueue.claim('day', 'w') \gset
update pgqueue.job set lease_expires_at = clock_timestamp() where id = :lost;
select count(*) from pgqueue.claim('day', 'w');
select is(
    pg_temp.why(:lost), 'its lease expired at TIME: the next maintain() recovers it (worker w)',
    'why says that no claim looks for expired leases where a rate is used up'
);
select pgqueue.configure('one', group_limit => 1);
select pgqueue.enqueue('one', kind => 'a', group_key => 'g');
select pgqueue.enqueue('one', kind => 'b', group_key => 'g', expires_at => now()) as late \gset
select is(
    pg_temp.why(:late), 'expired at TIME, not begun by then: the next claim or maintain() cancels it',
    'why says that a claim may find a job that has expired behind another of its group'
);
select pgqueue.pause('one', kind => 'a');
select count(*) from pgqueue.claim('one', 'w');
select is(
    pg_temp.why(:late), 'expired at TIME, not begun by then: the next maintain() cancels it', 'but not behind one that is paused'
);
select pgqueue.resume('one', kind => 'a');
update pgqueue.permit set token = -1 where token < 0;
select id as lost from pgqueue.claim('one', 'w') \gset
update pgqueue.job set lease_expires_at = clock_timestamp() where id = :lost;
select pgqueue.enqueue('one', group_key => 'g', priority => 5) as high \gset
select is(
    array[pg_temp.why(:lost), pg_temp.why(:high)],
    array[
        'its lease expired at TIME: the next claim recovers it (worker w)',
        format('its group g is busy with job %s, whose lease expired at TIME: a claim or maintain() ends it', :lost)
    ],
    'and that one ends a lost lease which keeps its group busy, whatever comes before that job'
);

-- A rate that was lowered

select pgqueue.configure('rate', rate_limit => 3, rate_period => '1 hour');
select pgqueue.enqueue_many('rate', array_fill('{}'::jsonb, array[4]));
update pgqueue.permit set token = -1 where token < 0;
select count(*) from pgqueue.claim('rate', 'w', 3);
update pgqueue.permit set taken_at = taken_at - place * interval '10 minutes', free_at = free_at - place * interval '10 minutes'
where queue = 'rate';
select is(
    pgqueue.why(max(j.id)),
    (
        select format('rate limited until %s: its queue begins at most 3 jobs in 01:00:00', pgqueue._written(min(p.free_at)))
        from pgqueue.permit as p where p.queue = 'rate'
    ),
    'why says when the first permit of a rate is free again'
) from pgqueue.job as j where j.queue = 'rate';
select pgqueue.configure('rate', rate_limit => 2);
select is(
    pgqueue.why(max(j.id)),
    (
        select format('rate limited until %s: its queue begins at most 2 jobs in 01:00:00', pgqueue._written(p.free_at))
        from pgqueue.permit as p where p.queue = 'rate' order by p.free_at offset 1 limit 1
    ),
    'and, after the rate was lowered, when the first is that still counts'
) from pgqueue.job as j where j.queue = 'rate';

-- Kinds that nobody takes

select pgqueue.enqueue('kinds', kind => 'other', run_at => now() - interval '9 minutes') as other \gset
select pgqueue.enqueue('kinds', kind => 'one');
select count(*) from pgqueue.claim('kinds', 'w', kinds => array['one']);
select is(pg_temp.why(:other), 'ready: next in its queue', 'why leaves a kind time until somebody claims it');
update pgqueue.job set run_at = run_at - interval '2 minutes' where id = :other;
select is(
    pg_temp.why(:other), 'ready: next in its queue; no worker has claimed its kind, as far as the log remembers',
    'why tells that nobody claims a kind of a queue from which others are claimed'
);
select pgqueue.rest(array['kinds'], array['one', 'two']);
select is(
    pg_temp.why(:other), 'ready: next in its queue; no worker takes its kind: the workers of its queue take others',
    'why tells that those who serve its queue take other kinds'
);

-- Groups are served in turn

select pgqueue.enqueue_many('turns', array_fill('1'::jsonb, array[9]), group_keys => array_fill('large'::text, array[9]));
select pgqueue.enqueue('turns', group_key => 'small') as first \gset
select pgqueue.enqueue('turns', group_key => 'small') as second \gset
select pgqueue.enqueue('turns') as plain \gset
select matches(
    pg_temp.why(:first), '^ready: next in its queue, in turn with other groups;', 'why counts no jobs of other groups as ahead'
);
select matches(
    pg_temp.why(:second), '^ready: waits behind 1 job of .* queue, in turn with other groups;', 'but those of its own group'
);
select matches(pg_temp.why(:plain), '^ready: next in its queue, in turn with groups;', 'nor does a job without a group wait for all');
select pgqueue.reprioritize(:plain, 1);
select matches(pg_temp.why(:first), '^ready: waits behind 1 job of .*, in turn with', 'and those of a higher priority');

-- Order in a group that has a limit

select pgqueue.enqueue('order', kind => 'one', group_key => 'g') as first \gset
select pgqueue.enqueue('order', kind => 'two', group_key => 'g') as second \gset
select pgqueue.pause('order', kind => 'one');
select alike(pg_temp.why(:second), 'ready: %', 'why says that a job may overtake another in a group without a limit');
select pgqueue.configure('order', group_limit => 2);
select is(
    pg_temp.why(:second), format('its group g waits for job %s, which comes first: its kind is paused', :first),
    'why names the job that keeps its group'
);
select pgqueue.resume('order', kind => 'one');
select alike(pg_temp.why(:second), 'ready: waits behind 1 job %', 'and says nothing of one that will run');
select pgqueue.rest(array['order'], array['two']);
select is(
    pg_temp.why(:second),
    format(
        'its group g waits for job %s, which comes first: no worker takes its kind: the workers of its queue take others', :first
    ),
    'unless nobody takes it'
);
select alike(pg_temp.why(:first), 'ready: next in its queue%', 'the first one waits for no other');
select pgqueue.reprioritize(:first, -1), pgqueue.reprioritize(:second, 3);
select pgqueue.pause('order', kind => 'two');
select alike(pg_temp.why(:first), 'ready: %', 'under a limit of 2 no job waits for one of a higher priority');
select pgqueue.configure('order', group_limit => 1);
select is(
    pg_temp.why(:first), format('its group g waits for job %s, which comes first: its kind is paused', :second),
    'under a limit of 1 it does'
);
select pgqueue.enqueue('order', kind => 'two', group_key => 'g', priority => 5, run_at => clock_timestamp() + '1 hour');
select alike(pg_temp.why(:first), format('%% waits for job %s, %%', :second), 'but not one that is not due');

select throws_ok('select pgqueue.why(-1)', 'PQ001', null, 'why refuses an id that nothing remembers');

set transaction_read_only = on;
select is(
    pg_temp.why(:id), 'completed at TIME on attempt 2', 'why works in a read-only transaction'
);
select matches(pg_temp.why(j.id), '^ready: next', 'and so for a job that is ready')
from pgqueue.jobs as j where j.queue = 'last';

select * from finish();
rollback;
