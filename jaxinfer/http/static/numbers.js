// What the server says of itself in Prometheus' text form, and what two such answers say of the time between them.
// No function here knows the page.

const PREFIX = "jaxinfer:";

/** The server's own samples, by name without the prefix: lists of {labels, value}. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith(PREFIX) && /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const name = found[1].slice(PREFIX.length);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: parseLabels(found[2] ?? ""), value: toNumber(found[3]) });
  }
  return samples;
}

function parseLabels(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
    labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
  }
  return labels;
}

function toNumber(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

/** What the page shows of one answer of /metrics, which came at `at_s` of the page's clock. Throws if it is not one. */
export function snapshot(samples, at_s) {
  const all = (name) => {
    const found = samples.get(name);
    if (!found) throw new Error(`/metrics has no ${PREFIX}${name}`);
    return found;
  };
  // Replicas behind one address have a sample each.
  const sum = (name) => total(all(name).map(({ value }) => value));
  const mean = (name) => sum(name) / all(name).length;
  const caches = all("cache_config_info").map(({ labels }) => labels);
  return {
    at_s,
    model: caches[0].model_name,
    numPages: total(caches.map((cache) => Number(cache.num_gpu_blocks))),
    hasPrefixCache: caches[0].enable_prefix_caching === "True",
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    pagesUsed: mean("kv_cache_usage_perc"),
    pagesKept: sum("prefix_cache_pages"),
    inputTokens: sum("prompt_tokens_total"),
    outputTokens: sum("generation_tokens_total"),
    lookedUp: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    finished: total((samples.get("request_success_total") ?? []).map(({ value }) => value)),
    firstToken: histogram(samples, "time_to_first_token_seconds"),
    betweenTokens: histogram(samples, "inter_token_latency_seconds"),
  };
}

function total(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0);
}

/** Upper bounds, and how many observations each has, those of lower bounds not included. */
function histogram(samples, name) {
  const upTo = new Map(); // of all replicas together, by upper bound
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    upTo.set(labels.le, (upTo.get(labels.le) ?? 0) + value);
  }
  let below = 0;
  return [...upTo].map(([bound, value]) => {
    const count = value - below;
    below = value;
    return { bound: toNumber(bound), count };
  });
}

/** The quantile of what was observed between two histograms, interpolated in its bucket; null if nothing was. */
export function quantile(share, before, after) {
  const counts = after.map(({ bound, count }, i) => ({ bound, count: count - (before[i]?.count ?? 0) }));
  const total = counts.reduce((sum, { count }) => sum + count, 0);
  if (!(total > 0)) return null;
  let rank = share * total;
  let lower = 0;
  for (const { bound, count } of counts) {
    if (count > 0 && rank <= count) return bound === Infinity ? lower : lower + ((bound - lower) * rank) / count;
    rank -= count;
    lower = bound;
  }
  return lower;
}

/** Snapshots of the last minutes, oldest first. */
export class History {
  constructor(length_s) {
    this.length_s = length_s;
    this.snapshots = [];
  }

  /** Adds the newest one. Counters that went back are those of a server that was started anew: all else is forgotten. */
  push(snapshot) {
    const last = this.snapshots.at(-1);
    if (last && (snapshot.outputTokens < last.outputTokens || snapshot.inputTokens < last.inputTokens)) {
      this.snapshots = [];
    }
    this.snapshots.push(snapshot);
    while (this.snapshots[0].at_s < snapshot.at_s - this.length_s) this.snapshots.shift();
  }

  get last() {
    return this.snapshots.at(-1);
  }

  /** The snapshot with which a window of `window_s` seconds begins; the oldest where there are not as many. */
  start(window_s) {
    const begin_s = this.last.at_s - window_s;
    return this.snapshots.findLast((snapshot) => snapshot.at_s <= begin_s) ?? this.snapshots[0];
  }

  /** By how much a counter grew each second of the window; null while there is but one snapshot. */
  rate(name, window_s) {
    const start = this.start(window_s);
    const passed_s = this.last.at_s - start.at_s;
    return passed_s > 0 ? (this.last[name] - start[name]) / passed_s : null;
  }

  /** [{at_s, value}] of a gauge. */
  values(name) {
    return this.snapshots.map((snapshot) => ({ at_s: snapshot.at_s, value: snapshot[name] }));
  }

  /** [{at_s, value}]: by how much a counter grew each second since the snapshot before. */
  rates(name) {
    return this.snapshots.slice(1).map((snapshot, i) => {
      const before = this.snapshots[i];
      return { at_s: snapshot.at_s, value: (snapshot[name] - before[name]) / (snapshot.at_s - before.at_s) };
    });
  }
}

/** 12,345 or 3.2 or 0. */
export function formatNumber(value) {
  const digits = value > 0 && value < 10 ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** 850 µs, 12 ms, 1.53 s. */
export function formatSeconds(value_s) {
  if (value_s < 0.001) return `${formatNumber(value_s * 1e6)} µs`;
  if (value_s < 1) return `${formatNumber(value_s * 1e3)} ms`;
  return `${value_s.toLocaleString("en", { maximumSignificantDigits: 3 })} s`;
}

export function formatShare(value) {
  const percent = 100 * value;
  return `${percent.toLocaleString("en", { maximumFractionDigits: percent > 0 && percent < 10 ? 1 : 0 })}%`;
}
