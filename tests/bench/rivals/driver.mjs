// What the Node drivers share: the verbs, the clock and the count of what was handled.
//
// A driver gives `main` an object with
//   depth, reset     SQL: the number of unfinished jobs; removal of all jobs
//   install()        makes the schema in an empty database
//   open(clients, kind)  a producer with that many connections, for the verb latency if kind
//                    is "latency": {add(n), addMany(numbers), close()}
//   work(options)    starts a worker, returns an async function that stops it after its
//                    acknowledgements are written. options.handle(n) is the handler,
//                    options.acknowledged() is to be called when completions were committed,
//                    options.kind is "noop", "nap" or "latency".
// Everything it prints on stdout is one line of JSON.

import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

// The packages lie in a folder of their own, named by BENCH_NODE_MODULES.
export const load = createRequire(`${process.env.BENCH_NODE_MODULES}/`);
const pg = load("pg");

const BULK = 5000; // jobs per bulk call
const IDLE = 2000; // ms without a job after which a drain is over
const seconds = (from, to = performance.now()) => (to - from) / 1000;
const numbers = (first, end) => Array.from({ length: end - first }, (_, i) => first + i);

async function query(sql) {
  const client = new pg.Client();
  await client.connect();
  const { rows } = await client.query(sql);
  await client.end();
  return rows;
}

const depth = async (rival) => Number(Object.values((await query(rival.depth))[0])[0]);

/** Contiguous [first, last] ranges of a set of numbers. */
function ranges(seen) {
  const found = [];
  for (const n of [...seen].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && last[1] === n - 1) last[1] = n;
    else found.push([n, n]);
  }
  return found;
}

async function bulk(rival, { jobs }) {
  const producer = await rival.open(1);
  const start = performance.now();
  for (let first = 0; first < jobs; first += BULK)
    await producer.addMany(numbers(first, Math.min(first + BULK, jobs)));
  const spent = seconds(start);
  await producer.close();
  return { seconds: spent };
}

async function enqueue(rival, { jobs, clients = 8 }) {
  const producer = await rival.open(clients);
  let next = 0;
  const client = async () => {
    while (next < jobs) await producer.add(next++);
  };
  const start = performance.now();
  await Promise.all(Array.from({ length: clients }, client));
  const spent = seconds(start);
  await producer.close();
  return { seconds: spent };
}

async function drain(rival, { jobs, limit, nap = null }) {
  const seen = new Set();
  let handled = 0;
  const start = performance.now();
  let active = start; // when the last job was handled
  let last = start; // when the last completion was acknowledged
  const handle = async (n) => {
    if (nap) await sleep(1000 * (nap[0] + Math.random() * (nap[1] - nap[0])));
    seen.add(n);
    handled += 1;
    active = performance.now();
  };
  const acknowledged = () => (last = performance.now());
  const stop = await rival.work({ kind: nap ? "nap" : "noop", handle, acknowledged });
  while (handled < jobs && seconds(start) < limit) {
    await sleep(10);
    if (performance.now() - active < IDLE) continue;
    if (handled || (await depth(rival)) === 0) break;
  }
  await stop();
  return { seconds: seconds(start, last), seen: ranges(seen), duplicates: handled - seen.size };
}

async function latency(rival, { jobs, every = 0.02 }) {
  const returned = [];
  const started = [];
  let handled = 0;
  const handle = async (n) => {
    started[n] ??= performance.now();
    handled += 1;
  };
  const stop = await rival.work({ kind: "latency", handle, acknowledged() {} });
  const producer = await rival.open(1, "latency");
  await sleep(1000); // until the worker is idle and listens
  const start = performance.now();
  for (let n = 0; n < jobs; n++) {
    await sleep(Math.max(0, start + n * every * 1000 - performance.now()));
    await producer.add(n);
    returned[n] = performance.now();
  }
  for (let wait = 0; handled < jobs && wait < 1000; wait++) await sleep(10);
  await stop();
  await producer.close();
  return { ms: numbers(0, jobs).filter((n) => started[n]).map((n) => started[n] - returned[n]) };
}

const verbs = {
  install: async (rival) => (await rival.install(), {}),
  reset: async (rival) => (await query(rival.reset), {}),
  depth: async (rival) => ({ jobs: await depth(rival) }),
  bulk,
  enqueue,
  drain,
  latency,
};

/** Do the verb of the command line, print its answer. */
export async function main(rival) {
  const [verb, text = "{}"] = process.argv.slice(2);
  const answer = await verbs[verb](rival, JSON.parse(text));
  process.stdout.write(`${JSON.stringify(answer)}\n`, () => process.exit(0));
}
