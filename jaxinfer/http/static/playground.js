// The page at /: joins the chat, the numbers and the settings.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { History, formatNumber, formatSeconds, formatShare, parseMetrics, quantile, snapshot } from "./numbers.js";
import { Failure, failureOf } from "./stream.js";

const POLL_MS = 2000; // an answer of /metrics takes a front end 5 ms, in which its streams wait
const TIMEOUT_MS = 10000;
const LENGTH_S = 180;
const RATE_WINDOW_S = 5;
const LATENCY_WINDOW_S = 60;
const KEY_ITEM = "jaxinfer-api-key";
const NUMBER_FIELDS = ["temperature", "top_p", "max_tokens", "seed"];

const element = (id) => document.getElementById(id);
const show = (id, text) => {
  const node = element(id);
  if (node.textContent !== text) node.textContent = text;
};

// The key: in the memory of this tab, which a reload keeps and its end does not.

let key = sessionStorage.getItem(KEY_ITEM) ?? "";
const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});

function askForKey(note, isWrong) {
  element("access").hidden = false;
  show("key-note", note);
  element("key").setAttribute("aria-invalid", String(isWrong));
}

async function useKey(event) {
  event.preventDefault();
  key = element("key").value.trim();
  if (key) sessionStorage.setItem(KEY_ITEM, key);
  else sessionStorage.removeItem(KEY_ITEM);
  await loadModels();
}

/** The names that the model may be asked by; with a key, whether it is one. */
async function loadModels() {
  if (document.documentElement.dataset.asksForKey === "yes" && !key) {
    return askForKey("This server asks for a key. It is kept in this tab alone.", false);
  }
  let reply;
  try {
    reply = await fetch("v1/models", { headers: authorization(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    return; // the state says that the server does not answer, and a chat will
  }
  if (!reply.ok) return tellOfRefusal(await failureOf(reply));
  const names = (await reply.json()).data.map(({ id }) => id);
  element("name").replaceChildren(...names.map((name) => new Option(name, name)));
  element("name-label").hidden = names.length < 2;
  if (key) askForKey("The server takes this key. It is kept in this tab alone.", false);
}

function tellOfRefusal(failure) {
  if (failure.status !== 401) return;
  askForKey(failure.message, true);
  element("key").focus();
}

// The chat

function request() {
  const fields = {};
  for (const name of NUMBER_FIELDS) {
    const input = element(name);
    if (input.validity.badInput) {
      throw new Failure("A setting is no number", `${input.labels[0].firstChild.data.trim()} must be a number, or empty.`);
    }
    if (input.value !== "") fields[name] = input.valueAsNumber;
  }
  const system = element("system").value.trim();
  const model = element("name").value;
  return { headers: authorization(), fields: { ...(model ? { model } : {}), ...(system ? { system } : {}), ...fields } };
}

const chat = new Chat(element("log"), {
  request,
  onRunning(isRunning) {
    element("send").hidden = isRunning;
    element("stop").hidden = !isRunning;
  },
  onFailure(failure) {
    tellOfRefusal(failure);
    poll();
  },
});

function ask(event) {
  event?.preventDefault();
  const question = element("question").value.trim();
  if (!question || chat.isRunning) return;
  element("question").value = "";
  element("empty").hidden = true;
  chat.ask(question);
}

function clearChat() {
  chat.clear();
  element("empty").hidden = false;
  element("question").focus();
}

// The numbers

const charts = Object.fromEntries(
  [
    ["output", "Output tokens per second"],
    ["input", "Input tokens per second"],
    ["running", "Running requests"],
    ["waiting", "Waiting requests"],
  ].map(([name, label]) => [name, new Chart(element(`${name}-chart`), label, LENGTH_S)]),
);
let past = new History(LENGTH_S);
let isPolling = false;

async function poll() {
  if (isPolling) return;
  isPolling = true;
  try {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const [ready, metrics] = await Promise.all([fetch("ready", { signal }), fetch("metrics", { signal })]);
    showState(ready.ok ? "ready" : "bad", ready.ok ? "ready" : (await failureOf(ready)).message);
    if (!metrics.ok) throw new Error((await failureOf(metrics)).message);
    past.push(snapshot(parseMetrics(await metrics.text()), performance.now() / 1000));
    showNumbers();
  } catch (error) {
    showState("bad", error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : error.message);
    document.body.classList.add("stale");
    show("numbers-title", "Last numbers");
  } finally {
    isPolling = false;
  }
}

function showState(kind, text) {
  element("state").dataset.state = kind;
  show("state", text);
}

function showNumbers() {
  const now = past.last;
  document.body.classList.remove("stale");
  show("numbers-title", "Live");
  show("model", now.model);
  document.title = `${now.model} · jaxinfer`;
  for (const [name, counter] of [["output", "outputTokens"], ["input", "inputTokens"]]) {
    const rate = past.rate(counter, RATE_WINDOW_S);
    show(name, rate === null ? "–" : formatNumber(rate));
    const peak = charts[name].draw(past.rates(counter), now.at_s, formatNumber);
    show(`${name}-peak`, peak > 0 ? `(peak ${formatNumber(peak)})` : "");
  }
  for (const name of ["running", "waiting"]) {
    show(name, formatNumber(now[name]));
    charts[name].draw(past.values(name), now.at_s, formatNumber);
  }
  showLatency("ttft", "firstToken");
  showLatency("between", "betweenTokens");
  showCache(now);
  show(
    "totals",
    `Since the start: ${formatNumber(now.finished)} done, ${formatNumber(now.inputTokens)} tokens in, ` +
      `${formatNumber(now.outputTokens)} out.`,
  );
}

function showLatency(id, name) {
  const before = past.start(LATENCY_WINDOW_S)[name];
  const [median, high] = [0.5, 0.95].map((share) => quantile(share, before, past.last[name]));
  show(id, median === null ? "–" : formatSeconds(median));
  show(`${id}-note`, median === null ? "none in the last minute" : `median; 95th percentile ${formatSeconds(high)}`);
}

function showCache(now) {
  show("pages", formatShare(now.pagesUsed));
  element("pages-meter").value = now.pagesUsed;
  const used = Math.round(now.pagesUsed * now.numPages);
  show("pages-note", `${formatNumber(used)} of ${formatNumber(now.numPages)} pages; ${formatNumber(now.pagesKept)} cached`);
  if (!now.hasPrefixCache) {
    show("hits", "off");
    return show("hits-note", "no prefix cache");
  }
  const start = past.start(LATENCY_WINDOW_S);
  const lookedUp = now.lookedUp - start.lookedUp;
  const overall = now.lookedUp ? `${formatShare(now.hits / now.lookedUp)} since the start` : "no prompt yet";
  show("hits", lookedUp ? formatShare((now.hits - start.hits) / lookedUp) : "–");
  show("hits-note", `of prompt tokens, last minute; ${overall}`);
}

// What the user does

element("ask").addEventListener("submit", ask);
element("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
});
element("stop").addEventListener("click", () => {
  chat.stop();
  element("question").focus();
});
element("clear").addEventListener("click", clearChat);
element("unlock").addEventListener("submit", useKey);
element("fields").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});

if (matchMedia("(max-width: 56rem)").matches) element("settings").open = false;

// A tab that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(() => document.hidden || poll(), POLL_MS);
loadModels();
poll();
