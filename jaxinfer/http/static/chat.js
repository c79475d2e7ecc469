// The conversation. What the model and the server say is put into the page as text, never as markup.

import { Failure, GONE, failureOf, replyEvents } from "./stream.js";
import { formatNumber, formatSeconds } from "./numbers.js";

const NEAR_END_PX = 40;
const ENDINGS = { length: "cut: no room for more tokens", content_filter: "cut by a filter" };

export class Chat {
  /**
   * log: where the exchanges are shown. request(): {headers, fields} of the next request; throws a Failure.
   * onRunning(flag): an answer begins or has ended. onFailure(failure): a request failed.
   */
  constructor(log, { request, onRunning, onFailure }) {
    this.log = log;
    this.request = request;
    this.onRunning = onRunning;
    this.onFailure = onFailure;
    this.exchanges = [];
    this.abort = null;
  }

  get isRunning() {
    return this.abort !== null;
  }

  /** Asks, and shows the answer as it comes. */
  async ask(question) {
    const exchange = new Exchange(this.log, question, () => this.again(exchange));
    this.exchanges.push(exchange);
    await this.answer(exchange);
  }

  async again(exchange) {
    if (this.isRunning) return;
    exchange.reset();
    await this.answer(exchange);
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    for (const exchange of this.exchanges) exchange.remove();
    this.exchanges = [];
  }

  async answer(exchange) {
    const abort = new AbortController();
    this.abort = abort;
    this.onRunning(true);
    this.log.setAttribute("aria-busy", "true"); // a screen reader is told the whole answer, not each token
    exchange.begin();
    this.scrollToEnd();
    try {
      await this.stream(exchange, abort.signal);
    } catch (error) {
      if (abort.signal.aborted) {
        exchange.end("stopped");
      } else {
        const failure = error instanceof Failure ? error : new Failure("The page failed", String(error));
        const follows = this.isAtEnd();
        exchange.fail(failure);
        if (follows) this.scrollToEnd();
        this.onFailure(failure);
      }
    } finally {
      if (this.abort === abort) {
        this.abort = null;
        this.log.removeAttribute("aria-busy");
        this.onRunning(false);
      }
    }
  }

  async stream(exchange, signal) {
    const { headers, fields } = this.request();
    const { system, ...parameters } = fields;
    const body = {
      ...parameters,
      messages: this.messages(system, exchange),
      stream: true,
      stream_options: { include_usage: true },
    };
    const start_ms = performance.now();
    let reply;
    try {
      reply = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...headers },
        body: JSON.stringify(body),
        signal,
      });
    } catch (error) {
      throw signal.aborted ? error : GONE;
    }
    if (!reply.ok) throw await failureOf(reply);
    const times = { start_ms, first_ms: null, last_ms: null };
    let ending = "";
    for await (const event of replyEvents(reply)) {
      if (event.usage) exchange.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const thought = choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
      const text = choice.delta.content ?? "";
      if (thought || text) {
        times.last_ms = performance.now();
        times.first_ms ??= times.last_ms;
        const follows = this.isAtEnd();
        exchange.add(thought, text);
        if (follows) this.scrollToEnd();
      }
      ending = choice.finish_reason ?? ending;
    }
    const follows = this.isAtEnd();
    exchange.end(ENDINGS[ending] ?? "", times);
    if (follows) this.scrollToEnd();
  }

  /** The conversation up to this exchange. One without an answer is left out: it was stopped, or failed. */
  messages(system, exchange) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, text } of this.exchanges.slice(0, this.exchanges.indexOf(exchange))) {
      if (text) messages.push({ role: "user", content: question }, { role: "assistant", content: text });
    }
    return [...messages, { role: "user", content: exchange.question }];
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

/** A question and its answer. */
class Exchange {
  constructor(log, question, again) {
    this.question = question;
    this.again = again;
    this.node = append(log, "article", "exchange");
    append(this.node, "p", "question", question);
    this.reset();
  }

  reset() {
    this.answer?.remove();
    this.answer = append(this.node, "div", "answer");
    this.answer.setAttribute("aria-label", "Answer");
    this.text = "";
    this.thoughtNode = null;
    this.textNode = null;
    this.usage = null;
  }

  remove() {
    this.node.remove();
  }

  begin() {
    this.node.classList.add("running");
    this.textNode = append(this.answer, "p", "text").appendChild(document.createTextNode(""));
  }

  add(thought, text) {
    if (thought) this.thoughts().appendData(thought);
    if (text) this.textNode.appendData(text);
    this.text += text;
  }

  /** The node of the reasoning, which is made once there is some. */
  thoughts() {
    if (this.thoughtNode === null) {
      const box = document.createElement("details");
      box.className = "thought";
      box.open = true;
      append(box, "summary", "", "Reasoning");
      this.thoughtNode = append(box, "p", "").appendChild(document.createTextNode(""));
      this.answer.prepend(box);
    }
    return this.thoughtNode;
  }

  end(how, times = null) {
    this.node.classList.remove("running");
    const parts = how ? [how] : [];
    const usage = this.usage;
    if (usage && times?.first_ms != null) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      const passed_s = (times.last_ms - times.first_ms) / 1000;
      parts.push(`${usage.prompt_tokens} tokens in` + (cached ? ` (${cached} cached)` : ""));
      parts.push(`${usage.completion_tokens} out`);
      parts.push(`first token after ${formatSeconds((times.first_ms - times.start_ms) / 1000)}`);
      if (passed_s > 0) parts.push(`${formatNumber((usage.completion_tokens - 1) / passed_s)} tokens/s`);
    }
    append(this.answer, "p", "note", parts.join(" · "));
  }

  fail(failure) {
    this.node.classList.remove("running");
    const box = append(this.answer, "div", "failure");
    box.setAttribute("role", "alert");
    append(box, "b", "", failure.title);
    append(box, "div", "", failure.message);
    if (failure.details) append(box, "div", "note", failure.details);
    const button = append(box, "button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", this.again);
  }
}

function append(parent, kind, className, text = "") {
  const node = document.createElement(kind);
  if (className) node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}
