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

create table pgqueue.step (
    job_id bigint not null,
    saved_at timestamptz not null,
    place int not null,
    name text not null,
    value jsonb not null,
    constraint step_pkey primary key (job_id, name)
);
comment on table pgqueue.step is
'What jobs have done, so that no retry does it again. Read it through steps.';
comment on column pgqueue.step.job_id is 'The job, which may be dead.';
comment on column pgqueue.step.saved_at is 'When it was saved.';
comment on column pgqueue.step.place is 'How many the job had, with this one.';
comment on column pgqueue.step.name is 'The name of the step.';
comment on column pgqueue.step.value is 'What it has given.';
create index step_place_idx on pgqueue.step (job_id, place);
comment on index pgqueue.step_place_idx is 'What has the job done last?';

create table pgqueue.wait (
    job_id bigint not null,
    since timestamptz not null,
    event text,
    step text,
    constraint wait_pkey primary key (job_id)
);
comment on table pgqueue.wait is
'Which jobs were suspended, from then until something else happens to them. One
whose event has happened is work left to do.';
comment on column pgqueue.wait.job_id is 'The job.';
comment on column pgqueue.wait.since is 'When it was suspended.';
comment on column pgqueue.wait.event is 'The event that it waits for; null for none.';
comment on column pgqueue.wait.step is 'The step to save if an operator ends the wait; null for none.';
create index wait_event_idx on pgqueue.wait (hashtextextended(event, 0)) where event is not null;
comment on index pgqueue.wait_event_idx is 'Who waits for an event?';

-- No row is ever updated: an emit would wait for that.
create table pgqueue.event (
    emitted_at timestamptz not null,
    name text not null,
    payload jsonb not null,
    constraint event_pkey primary key (name)
);
comment on table pgqueue.event is
'What has happened, for as long as keep_events says. Read it through the view
events.';
comment on column pgqueue.event.emitted_at is 'When emit was called.';
comment on column pgqueue.event.name is 'The name of the event.';
comment on column pgqueue.event.payload is 'What the first emit said about it.';
create index event_emitted_idx on pgqueue.event (emitted_at);
comment on index pgqueue.event_emitted_idx is 'Which events can be forgotten?';

create type pgqueue._suspension as (event text, run_at timestamptz, after bigint[], step text);
comment on type pgqueue._suspension is
'What a suspended job waits for: an event, a moment or the ends of jobs,
whichever comes first; null for not. And the step that run_now saves.';

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

-- One row where this database is a shard. pg_dump keeps what a sequence of an extension has handed out, and not
-- by how much it steps: a trigger (module shard) sets that whenever the row is written, also while it is restored.
create table pgqueue.shard (
    number int not null,
    of int not null,
    above bigint not null default 0,
    constraint shard_is_sane check (number >= 1 and number <= of and of <= 65536 and above >= 0)
);
alter table pgqueue.shard replica identity full;
comment on table pgqueue.shard is
'Which shard this database is, as told by the function shard; no row: none.';
comment on column pgqueue.shard.number is
'Its number: that of its ids and tokens, which are number, number + of,
number + 2 of ...';
comment on column pgqueue.shard.of is 'How many shards there can be.';
comment on column pgqueue.shard.above is
'Ids and tokens up to this are older than the shards: they may be of any.';

create table pgqueue.moving (
    what text not null,
    key text not null,
    content jsonb,
    constraint moving_pkey primary key (what, key)
);
comment on table pgqueue.moving is
'What move-groups is just moving between shards: on its way here, with its
content; or gone from here, without.';
comment on column pgqueue.moving.what is
'The table: job, dead_job or schedule; or paused: a group that is, meanwhile;
or shards: how many there are, for as long as move-groups is at work.';
comment on column pgqueue.moving.key is 'The id, the name, or the number.';
comment on column pgqueue.moving.content is 'The row that arrives; null if it has left.';

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
