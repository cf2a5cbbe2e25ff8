// One reply while it comes: what has arrived, which phase it is in, and the clock.

import { chat } from "./api.js";

/** Phases: waiting (nothing heard yet), queued, starting, prefill, decode, then done, stopped or failed. */
export class Run {
  phase = "waiting";
  began = performance.now();
  firstAt = null; // of the first token
  ahead = null; // requests before this one in the queue
  promptTokens = null;
  cachedTokens = 0;
  prefill = { done: 0, total: 0 };
  tokens = 0;
  window = null;
  speed = null;
  hitRate = null;
  diskRate = null;
  slides = false;
  usage = null;
  finish = null;

  #abort = new AbortController();

  /** `message` is the reply in the conversation, filled as text arrives; `on` has change(), notice(text), model(id). */
  constructor(message, body, on) {
    this.message = message;
    this.body = body;
    this.on = on;
  }

  get running() {
    return !["done", "stopped", "failed"].includes(this.phase);
  }

  get waited() {
    return (this.endedAt ?? performance.now()) - this.began;
  }

  stop() {
    this.#abort.abort();
  }

  /** Runs to the end; never throws. What became of it stands in `message.state` and `message.error`. */
  async go() {
    try {
      for await (const chunk of chat(this.body, this.#abort.signal)) {
        if (chunk.smoe) this.#progress(chunk.smoe);
        this.#chunk(chunk);
        this.on.change();
      }
      this.#end("done");
    } catch (error) {
      if (error.name === "AbortError") return this.#end("stopped");
      this.message.error = { status: error.status ?? 0, text: error.message, retryAfter: error.retryAfter ?? null };
      this.#end("failed");
    }
  }

  #chunk(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.model && chunk.model !== this.message.model) this.on.model((this.message.model = chunk.model));
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta ?? {};
    if (content || reasoning) this.#decoding();
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    if (content) {
      if (this.message.reasoning && !this.message.content) this.message.thoughtMs = performance.now() - this.firstAt;
      this.message.content += content;
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  #decoding() {
    this.firstAt ??= performance.now();
    this.phase = "decode";
  }

  /** The server's reports on the request: each field that is there replaces what was known. */
  #progress(report) {
    if (report.phase === "restarted") {
      this.on.notice(`The engine stopped: ${report.reason}. It was started again and the request repeated.`);
      this.phase = "starting";
      return;
    }
    if (report.phase === "decode") this.#decoding();
    else if (this.firstAt === null && report.phase !== "done") this.phase = report.phase;
    this.ahead = report.ahead ?? this.ahead;
    this.promptTokens = report.prompt_tokens ?? this.promptTokens;
    this.cachedTokens = report.cached_tokens ?? this.cachedTokens;
    this.prefill = { done: report.done ?? this.prefill.done, total: report.total ?? this.prefill.total };
    this.tokens = report.tokens ?? this.tokens;
    this.window = report.window ?? this.window;
    this.speed = report.decode_tok_s ?? this.speed;
    this.hitRate = report.hit_rate ?? this.hitRate;
    this.diskRate = report.disk_bytes_s ?? this.diskRate;
    this.slides ||= report.slides ?? false;
  }

  #end(phase) {
    this.endedAt = performance.now();
    this.phase = phase;
    this.message.state = phase;
    this.message.finish = phase === "stopped" ? "stopped" : this.finish;
    this.message.figures = this.figures();
    this.on.change();
  }

  /** Tokens of the conversation in the window: exact at the end, as far as it is known before. */
  get contextTokens() {
    if (this.usage) return this.usage.prompt_tokens + this.usage.completion_tokens;
    return this.promptTokens === null ? null : this.promptTokens + this.tokens;
  }

  /** What is kept under a finished reply. */
  figures() {
    const { usage } = this;
    return {
      promptTokens: usage?.prompt_tokens ?? this.promptTokens,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? this.cachedTokens,
      tokens: usage?.completion_tokens ?? this.tokens,
      exact: Boolean(usage),
      ttftMs: this.firstAt === null ? null : this.firstAt - this.began,
      totalMs: this.waited,
      speed: this.speed,
      hitRate: this.hitRate,
      diskRate: this.diskRate,
    };
  }
}
