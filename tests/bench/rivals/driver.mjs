// What the Node drivers share: the verbs, the clock and the count of what was handled.
//
// A driver gives `main` an object with
//   install()        makes the schema in an empty database
//   open(clients, kind)  a producer with that many connections, one that notifies if kind
//                    is "latency": {add(payload), addMany(payloads, priority), close()}; a larger
//                    priority is more urgent, a payload has a number n, and a group if kind is
//                    "groups" or "loose"
//   work(options)    starts a worker, returns an async function that stops it after its
//                    acknowledgements are written. options.handle(n) is the handler,
//                    options.acknowledged() is to be called when completions were committed,
//                    options.kind is "noop", "sleep", "latency", or "groups", for jobs of which
//                    one of each group runs at a time, or "loose", for the same in a way
//                    that does not promise it.
// Everything it prints on stdout is one line of JSON.

import { randomBytes } from "node:crypto";
import { appendFileSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

// The packages lie in a folder of their own, named by BENCH_NODE_MODULES.
export const load = createRequire(`${process.env.BENCH_NODE_MODULES}/`);
const pg = load("pg");

const BULK = 5000; // jobs per bulk call
const IDLE = 2000; // ms without a job after which a drain is over
const seconds = (from, to = performance.now()) => (to - from) / 1000;
const numbers = (first, end) => Array.from({ length: end - first }, (_, i) => first + i);

/** The first value of a query's first row, as a number. */
async function number(sql) {
  const client = new pg.Client();
  await client.connect();
  const { rows } = await client.query({ text: sql, rowMode: "array" });
  await client.end();
  return Number(rows[0][0]);
}

/** Payloads of about so many bytes; random ones, which TOAST cannot make small. */
const numbered = (numbers, size) =>
  numbers.map((n) => (size ? { n, pad: randomBytes(size >> 1).toString("hex") } : { n }));

/** The first `busy` jobs are of one group, the others of so many, in turn. */
function addGroups(payloads, busy, groups) {
  for (const payload of payloads)
    payload.group = payload.n < busy ? "busy" : `g${(payload.n - busy) % groups}`;
}

/** Add so many jobs, numbered from `first`, their priorities in turn. */
async function bulk(rival, { jobs, first = 0, priorities = 1, size = 0, busy = 0, groups = 0, kind = "noop" }) {
  const most = Math.min(BULK, Math.floor(20_000_000 / Math.max(size, 1)));
  const producer = await rival.open(1, kind);
  let spent = 0;
  for (let place = first; place < first + jobs; place += most * priorities) {
    const all = numbers(place, Math.min(place + most * priorities, first + jobs));
    for (let priority = 0; priority < priorities; priority++) {
      const payloads = numbered(all.filter((n) => (n - place) % priorities === priority), size);
      if (groups) addGroups(payloads, busy, groups);
      const start = performance.now();
      if (payloads.length) await producer.addMany(payloads, priority);
      spent += seconds(start);
    }
  }
  await producer.close();
  return { seconds: spent };
}

/** Add jobs one by one for so many seconds. */
async function enqueue(rival, { limit, clients = 8, kind = "noop" }) {
  const producer = await rival.open(clients, kind);
  let next = 0;
  const start = performance.now();
  const client = async () => {
    while (seconds(start) < limit) await producer.add({ n: next++ });
  };
  await Promise.all(Array.from({ length: clients }, client));
  const spent = seconds(start);
  await producer.close();
  return { seconds: spent, jobs: next };
}

/** A bit for each number. */
class Bits {
  bytes = Buffer.alloc(1 << 20);
  twice = 0;
  add(n) {
    if (n >> 3 >= this.bytes.length) this.bytes = Buffer.concat([this.bytes, Buffer.alloc(n >> 3)]);
    this.twice += (this.bytes[n >> 3] >> (n & 7)) & 1;
    this.bytes[n >> 3] |= 1 << (n & 7);
  }
  hex() {
    return this.bytes.subarray(0, this.bytes.findLastIndex((byte) => byte) + 1).toString("hex");
  }
}

/** Work until so many jobs ran here, nothing comes any more, or time is up; see driver.py. */
async function drain(rival, { jobs, limit, depth, sleeps = null }) {
  const seen = new Bits();
  const waits = [];
  const start = performance.now();
  let active = start; // when the last job was handled
  let last = start; // when the last completion was acknowledged
  const handle = async (n) => {
    waits.push(seconds(start));
    if (sleeps) await sleep(1000 * (sleeps[0] + Math.random() * (sleeps[1] - sleeps[0])));
    seen.add(n);
    active = performance.now();
  };
  const acknowledged = () => (last = performance.now());
  const stop = await rival.work({ kind: sleeps ? "sleep" : "noop", handle, acknowledged });
  let cut = false;
  while (waits.length < jobs && !cut) {
    await sleep(10);
    cut = seconds(start) > limit;
    if (performance.now() - active < IDLE) continue;
    if (waits.length || (await number(depth)) === 0) break;
  }
  await stop();
  waits.sort((a, b) => a - b);
  const percentiles = [50, 99].filter(() => waits.length);
  return {
    seconds: seconds(start, last),
    seen: seen.hex(),
    twice: seen.twice,
    cut,
    waits: percentiles.map((part) => waits[Math.floor((waits.length * part) / 100)]),
  };
}

/** See driver.py. */
async function groups(rival, { few, busy, limit, folder, hold, kind }) {
  const clock = () => Number(process.hrtime.bigint()) / 1e9;
  const runs = [];
  const start = clock();
  let last = start;
  const handle = async (n) => {
    const began = clock();
    await sleep(1000 * hold);
    runs.push([n, began, clock()]);
  };
  const acknowledged = () => (last = clock());
  const [progress, log] = [`${folder}/done`, `${folder}/${process.pid}`];
  const stop = await rival.work({ kind, handle, acknowledged });
  let told = 0;
  let done = 0;
  while (done < few && clock() - start < limit) {
    await sleep(10);
    appendFileSync(progress, ".".repeat(runs.slice(told).filter(([n]) => n >= busy).length));
    told = runs.length;
    done = statSync(progress).size;
  }
  await stop();
  writeFileSync(log, JSON.stringify(runs));
  return { start, last, cut: done < few, runs: log };
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
    await producer.add({ n });
    returned[n] = performance.now();
  }
  for (let wait = 0; handled < jobs && wait < 1000; wait++) await sleep(10);
  await stop();
  await producer.close();
  const ms = numbers(0, jobs).filter((n) => started[n]).map((n) => started[n] - returned[n]);
  return { ms, twice: handled - ms.length };
}

const verbs = {
  install: async (rival) => (await rival.install(), {}),
  bulk,
  enqueue,
  drain,
  groups,
  latency,
};

/** Do the verb of the command line, print its answer. */
export async function main(rival) {
  const [verb, text = "{}"] = process.argv.slice(2);
  const answer = await verbs[verb](rival, JSON.parse(text));
  // Not by process.stdout, which would lose what the pipe does not take at once.
  writeFileSync(1, `${JSON.stringify(answer)}\n`);
  process.exit(0);
}
