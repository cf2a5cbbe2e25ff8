// Server-sent events from a byte stream. One decoder serves the whole stream: a network chunk may end inside a
// character, and decoding each chunk alone would turn both halves into replacement characters.

/** Yields {event, data} for each event of the stream, however its bytes are cut. */
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      yield* parser.feed(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Text in any pieces to events: lines end in CR, LF or both, a blank line ends an event, comments leave nothing. */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];

  *feed(text) {
    this.#rest += text;
    for (;;) {
      const end = this.#rest.search(/[\r\n]/);
      // A CR at the very end may be half of CRLF: the next piece tells.
      if (end < 0 || (this.#rest[end] === "\r" && end === this.#rest.length - 1)) return;
      const width = this.#rest.startsWith("\r\n", end) ? 2 : 1;
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(end + width);
      if (line === "") {
        if (this.#data.length) yield { event: this.#event || "message", data: this.#data.join("\n") };
        this.#event = "";
        this.#data = [];
      } else {
        this.#field(line);
      }
    }
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event = value;
    else if (name === "data") this.#data.push(value);
  }
}
