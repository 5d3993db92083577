// graphile-worker 0.18.0: run() with concurrentJobs 24 (32 for jobs that sleep), a pool of one more,
// a local queue of 500 (50 for jobs that sleep), completions batched with completeJobBatchDelay 0,
// prepared statements; bulk by utils.addJobs. Latency: no local queue, completions one by one,
// as its documentation advises (the local queue trades latency for throughput). Groups are named
// queues, 32 at once; run_at ascends, as that of jobs added one by one.

import { load, main } from "./driver.mjs";

const { Logger, makeWorkerUtils, run } = load("graphile-worker");
const pg = load("pg");

const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});

const PRESETS = {
  noop: { concurrentJobs: 24, localQueue: { size: 500 }, completeJobBatchDelay: 0 },
  sleep: { concurrentJobs: 32, localQueue: { size: 50 }, completeJobBatchDelay: 0 },
  latency: { concurrentJobs: 24, completeJobBatchDelay: -1 },
  groups: { concurrentJobs: 32, localQueue: { size: 500 }, completeJobBatchDelay: 0 },
};

/** What a job says of its group; jobs of one call would else have one run_at, and no order. */
const named = ({ n, group }) => (group ? { queueName: group, runAt: new Date(n) } : {});

/** A pool; with a callback, one that tells when a statement that completes jobs came back. */
function newPool(size, acknowledged) {
  class Client extends pg.Client {
    query(...args) {
      const result = super.query(...args);
      const text = args[0]?.text ?? "";
      if (acknowledged && /^(delete from|with j as)/.test(text)) result.then(acknowledged, () => {});
      return result;
    }
  }
  const tell = (error) => console.error(error.message);
  const pool = new pg.Pool({ Client, max: size, min: size });
  pool.on("error", tell);
  pool.on("connect", (client) => client.on("error", tell));
  return pool;
}

await main({
  async install() {
    const utils = await makeWorkerUtils({ logger, pgPool: newPool(1) });
    await utils.migrate();
    await utils.release();
  },

  async open(clients) {
    const pool = newPool(clients);
    const utils = await makeWorkerUtils({ logger, pgPool: pool });
    const warm = await Promise.all(Array.from({ length: clients }, () => pool.connect()));
    for (const client of warm) client.release();
    return {
      add: (payload) => utils.addJob("bench", payload),
      // Its smaller numbers are more urgent.
      addMany: (payloads, priority) =>
        utils.addJobs(
          payloads.map((payload) => ({ identifier: "bench", payload, priority: -priority, ...named(payload) })),
        ),
      close: async () => (await utils.release(), await pool.end()),
    };
  },

  async work({ kind, handle, acknowledged }) {
    const pool = newPool(PRESETS[kind].concurrentJobs + 1, acknowledged);
    const runner = await run({
      logger,
      pgPool: pool,
      noHandleSignals: true,
      preset: { worker: { ...PRESETS[kind], preparedStatements: true } },
      taskList: { bench: ({ n }) => handle(n) },
    });
    return async () => (await runner.stop(), await pool.end());
  },
});
