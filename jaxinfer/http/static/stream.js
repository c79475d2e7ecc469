// Streamed replies, and failures in words. No function here knows the page.

/** The data of server-sent events, from pieces of text that may end anywhere. */
export class EventReader {
  constructor() {
    this.rest = "";
    this.data = [];
  }

  /** The events that are complete with this piece. */
  push(piece) {
    const lines = (this.rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) events.push(this.data.join("\n"));
        this.data = [];
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return events;
  }
}

/** A failure as the page shows it. */
export class Failure extends Error {
  /** title: what happened. message: why, in the server's words. details: for whoever looks into it. */
  constructor(title, message, details = "", status = null) {
    super(message);
    this.title = title;
    this.details = details;
    this.status = status;
  }
}

const TITLES = {
  400: "The server refused the request",
  401: "The API key is missing or wrong",
  403: "The server refused the request",
  404: "The server does not know this",
  413: "The conversation is too large",
  429: "The server is busy",
  503: "The server cannot take this now",
  504: "The request took too long",
};
const MAX_CHARS = 400;

export const GONE = new Failure("The server does not answer", "Is it running? Look at its log, then try again.");
export const CUT = new Failure("The connection was lost", "The answer ended before it was complete.");

/** The failure that a reply with an error status tells of, whether this server sent it or something before it. */
export async function failureOf(reply) {
  const text = await reply.text();
  const title = TITLES[reply.status] ?? (reply.status >= 500 ? "The server failed" : "The server refused the request");
  const details = [`HTTP ${reply.status}`];
  let message = text.slice(0, MAX_CHARS) || reply.statusText;
  try {
    const { error } = JSON.parse(text);
    message = String(error.message);
    if (error.code) details.push(error.code);
    if (error.param) details.push(`field ${error.param}`);
  } catch {
    // No error of ours: shown as it is.
  }
  const id = reply.headers.get("X-Request-Id");
  if (id) details.push(`request ${id}`);
  return new Failure(title, message, details.join(", "), reply.status);
}

/** What each event of a streamed reply says, as objects, up to [DONE]. Throws a Failure; an abort is thrown as it is. */
export async function* replyEvents(reply) {
  const events = new EventReader();
  const pieces = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await pieces.read();
      if (done) throw CUT;
      for (const data of events.push(value)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure("The answer failed", String(event.error.message), String(event.error.code ?? ""));
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw CUT; // what browsers make of a connection that broke
    throw error;
  } finally {
    pieces.cancel().catch(() => {});
  }
}
