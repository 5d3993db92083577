-- The last deaths are found by an index: `redrive` and `discard_many` by a time of death in any queue, the
-- command `dead`, and the dashboard's list of dead jobs take milliseconds among millions of dead jobs.

create index dead_job_died_idx on pgqueue.dead_job (died_at);
comment on index pgqueue.dead_job_died_idx is 'Which jobs died in some time? Which last?';

-- Jobs that take days: steps that are not repeated, and waits for events, times and other jobs that cost nothing.

alter type pgqueue._terms add attribute after bigint[];
comment on type pgqueue._terms is
'The terms on which a job runs, if there are any: not begun after expires_at;
run_at, once nothing blocks it any more (null: at once); part of a batch; and
the jobs that it has waited for, whose results it may read.';
create index batch_callback_idx on pgqueue.batch (callback_id) where callback_id is not null;
comment on index pgqueue.batch_callback_idx is 'Whose callback is this?';

alter table pgqueue.step set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on);
alter table pgqueue.wait set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on);

comment on sequence pgqueue.used_seq is
'Bits: in which of 63 folds of queues something is set; below 0 if a schedule,
a batch, a dependency or an event ever was there, so that claims look around.';
comment on sequence pgqueue.awaited_seq is
'Bits: in which of 63 folds of queues there may be jobs that others were enqueued
after, that sessions wait for, that have saved steps or were suspended; below 0
if access was ever limited to queues.';
comment on table pgqueue.loose_end is
'Which ties or batches to look at before the sweep gets there: hints, safe to
lose. And which events and waits have not been looked at since they were
committed: of these none may get lost.';
comment on column pgqueue.loose_end.id is 'A job, a batch, or the hash of an event.';
comment on column pgqueue.loose_end.what is
'ended: a job that others may still wait for; new: one that may have ended while
another was enqueued after it, to look at after all others; batch: a batch that
may be over; event: an event that was emitted; wait: a job that waits for one.';
comment on column pgqueue.run.options is 'Its priority, max_attempts and group_key, likewise; and its
batch_id, if it has one.';

-- Shards: several databases whose ids and tokens differ, and numbers that no failover gives out again.

-- What is kept for ranges of ids, where those of a shard lie apart.
alter table pgqueue.tally add column parts int not null default 1;
comment on column pgqueue.tally.parts is
'How many times 1,024 ids: on a shard, those among which 1,024 are its own.';
comment on column pgqueue.gone.part is
'Which 64 ids they are among: id >> 6; below 0: which 64 of those of one shard.';

-- A claim that must know what is paused in its queue reads a list of at most 100 groups, however many there are.
drop index pgqueue.queue_narrow_idx, pgqueue.queue_dead_idx, pgqueue.queue_cap_idx, pgqueue.queue_group_idx;
create index queue_limit_idx on pgqueue.queue (name, left(group_key, 1))
where num_nonnulls(max_running, rate_limit, rate_period, weight, group_limit, group_on_retry) > 0;
comment on index pgqueue.queue_limit_idx is 'Which caps has a queue, or limits its groups?';

create index queue_narrow_idx on pgqueue.queue (name, num_nonnulls(paused), left(group_key, 1))
where kind <> '' or group_key <> '';
comment on index pgqueue.queue_narrow_idx is 'What is set, or paused, for kinds and groups?';

create index queue_lease_idx on pgqueue.queue (name)
where lease is not null and (kind <> '' or group_key <> '');
comment on index pgqueue.queue_lease_idx is 'Do kinds or groups of a queue have leases of their own?';

-- The timeline of the server when numbers were last skipped.
create sequence pgqueue._cell_timeline minvalue 0;
-- Which transaction was the last to change settings.
create sequence pgqueue._cell_set_by minvalue 0;
-- Until when claims look whether a limit of their queue is just being set.
create sequence pgqueue._cell_held_off minvalue 0;
-- Until when claims that leave jobs out believe that the groups they have passed over give none.
create sequence pgqueue._cell_groups_vain minvalue 0;

-- Their arguments or results are others.
drop function pgqueue.configure(
    text, interval, int, interval, interval, int, int, boolean, boolean, text, text, int, int, text, int, int, interval, interval,
    interval, boolean, interval
);
drop function pgqueue.status(bigint);
drop function pgqueue._forget_ends(), pgqueue._permits(text, pgqueue._cap, timestamptz);
