// pg-boss 12.34.0: a partitioned queue, work() with batches of 500, localConcurrency 3 and
// burstWhenBatchFull (without which a worker sleeps between fetches); bulk by boss.insert.
// Jobs that sleep: batches of 50, localConcurrency 4, at most 32 of them at once. Latency: a
// queue with notify, useListenNotify, batchSize 1, localConcurrency 4.
// Groups: a queue with the policy key_strict_fifo, where the group is the singletonKey; ids ascend,
// because jobs of one insert are taken in their order; 32 at once. Of its ways with groups this is
// the one that its documentation calls strict; the other is the kind "loose": groupConcurrency 1.
// A batch's completions are one statement, its own way to acknowledge.

import { load, main } from "./driver.mjs";

const { PgBoss } = load("pg-boss");

const AT_ONCE = 32;
const WORK = {
  noop: { batchSize: 500, localConcurrency: 3, burstWhenBatchFull: true },
  sleep: { batchSize: 50, localConcurrency: 4, burstWhenBatchFull: true },
  latency: { batchSize: 1, localConcurrency: 4 },
  groups: { batchSize: 500, localConcurrency: 3, burstWhenBatchFull: true },
  loose: { batchSize: 500, localConcurrency: 3, burstWhenBatchFull: true, groupConcurrency: 1 },
};
const QUEUE = { latency: "bench-notify", groups: "bench-groups" };

async function start(options) {
  const boss = new PgBoss({ schedule: false, ...options });
  boss.on("error", (error) => console.error(error.message));
  return boss.start();
}

/** What a job says of its group. */
function keyed({ n, group }, kind) {
  if (!group) return {};
  const id = `00000000-0000-4000-8000-${String(n).padStart(12, "0")}`;
  return kind === "loose" ? { id, group: { id: group } } : { id, singletonKey: group };
}

/** A function that runs at most `size` async functions at once. */
function gate(size) {
  const waiting = [];
  return async (task) => {
    if (size > 0) size -= 1;
    else await new Promise((go) => waiting.push(go));
    try {
      return await task();
    } finally {
      if (waiting.length) waiting.shift()();
      else size += 1;
    }
  };
}

await main({
  async install() {
    const boss = await start({ supervise: false });
    await boss.createQueue("bench", { partition: true });
    await boss.createQueue("bench-notify", { partition: true, notify: true });
    await boss.createQueue("bench-groups", { partition: true, policy: "key_strict_fifo" });
    await boss.stop();
  },

  async open(clients, kind) {
    const queue = QUEUE[kind] ?? "bench";
    const boss = await start({ max: clients, min: clients, supervise: false });
    await Promise.all(Array.from({ length: clients }, () => boss.getDb().executeSql("select 1")));
    return {
      add: (payload) => boss.send(queue, payload),
      addMany: (payloads, priority) => boss.insert(queue, payloads.map((data) => ({ data, priority, ...keyed(data, kind) }))),
      close: () => boss.stop({ graceful: false }),
    };
  },

  async work({ kind, handle, acknowledged }) {
    const latency = kind === "latency";
    const boss = await start({ useListenNotify: latency });
    const db = boss.getDb();
    const execute = db.executeSql.bind(db);
    db.executeSql = async (text, values) => {
      const result = await execute(text, values);
      if (/SET completed_on/.test(text)) acknowledged();
      return result;
    };
    const enter = ["sleep", "groups", "loose"].includes(kind) ? gate(AT_ONCE) : (task) => task();
    await boss.work(QUEUE[kind] ?? "bench", { pollingIntervalSeconds: 0.5, ...WORK[kind] }, (jobs) =>
      Promise.all(jobs.map((job) => enter(() => handle(job.data.n)))).then(() => {}),
    );
    return () => boss.stop();
  },
});
