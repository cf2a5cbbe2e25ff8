// The messages of a conversation on the page.

import { copyText, h, icon, iconButton } from "./dom.js";
import { count, diskRate, percent, rate, seconds } from "./format.js";
import { GrowingMarkdown } from "./markdown.js";

const FINISHES = {
  stop: ["finished", "The model ended its reply."],
  length: [
    "cut off at the limit",
    "The longest reply was reached; ask it to go on, or raise the limit in the settings.",
  ],
  stopped: ["stopped", "You stopped this reply."],
  tool_calls: ["called a tool", "The model asked for a tool, which the console does not run."],
  content_filter: ["ended by the policy", "A rule of the server's operator ended this reply."],
};

export class Transcript {
  #views = new Map();
  #following = true;

  /** `actions`: again(message), edit(message, text), suggest(text). */
  constructor(root, scroller, toEnd, actions) {
    Object.assign(this, { root, scroller, toEnd, actions });
    toEnd.append(icon("down"), "Latest");
    toEnd.addEventListener("click", () => this.follow());
    scroller.addEventListener("scroll", () => {
      this.#following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
      toEnd.hidden = this.#following;
    });
  }

  /** Show a conversation from its start; `empty` is what stands there before the first message. */
  show(conversation, run, empty) {
    this.#views.clear();
    this.root.replaceChildren();
    if (!conversation.messages.length) this.root.append(empty);
    for (const message of conversation.messages) {
      const view = viewOf(message, this.actions);
      this.#views.set(message.id, view);
      this.root.append(view.element);
      view.update(message, run?.message === message ? run : null);
    }
    this.#markLast(conversation);
    this.follow();
  }

  /** The running reply has more to show, or its clock went on. */
  live(run) {
    this.#views.get(run.message.id)?.update(run.message, run.running ? run : null);
    if (this.#following) this.#toBottom();
  }

  follow() {
    this.#following = true;
    this.toEnd.hidden = true;
    this.#toBottom();
  }

  /** Open the editor of a message, as its button does. */
  edit(id) {
    this.#views.get(id)?.startEdit?.();
  }

  #toBottom() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #markLast(conversation) {
    const last = conversation.messages.findLast((message) => message.role === "assistant");
    if (last) this.#views.get(last.id).element.classList.add("last");
  }
}

function viewOf(message, actions) {
  if (message.role === "user") return new UserView(message, actions);
  if (message.role === "assistant") return new ReplyView(message, actions);
  const element = h("p", { class: "notice" }, message.content);
  return { element, update() {} };
}

class UserView {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.text = h("div", { class: "bubble" });
    const copy = iconButton("copy", "Copy", () => copyText(this.message.content, copy));
    const edit = iconButton("edit", "Edit and send again", () => this.startEdit());
    this.buttons = h("div", { class: "actions" }, copy, edit);
    this.element = h("article", { class: "message user", "aria-label": "You" }, this.text, this.buttons);
  }

  update(message) {
    this.message = message;
    this.text.textContent = message.content;
    this.element.classList.toggle("unanswered", Boolean(message.unanswered));
    this.element.title = message.unanswered ? "Not answered, and not part of the conversation any more" : "";
  }

  startEdit() {
    if (this.element.querySelector("textarea")) return;
    const box = h("textarea", {
      rows: Math.min(12, this.message.content.split("\n").length + 1),
      "aria-label": "Edit the message",
    });
    box.value = this.message.content;
    const form = h(
      "form",
      { class: "edit" },
      box,
      h(
        "div",
        { class: "edit-foot" },
        h("button", { type: "button", class: "quiet", onclick: () => this.#endEdit() }, "Cancel"),
        h("button", { type: "submit", class: "button primary" }, "Send again"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!box.value.trim()) return;
      this.actions.edit(this.message, box.value);
    });
    box.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        this.#endEdit();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.element.classList.add("editing");
    this.element.append(form);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }

  #endEdit() {
    this.element.querySelector("form").remove();
    this.element.classList.remove("editing");
    this.buttons.lastElementChild.focus();
  }
}

class ReplyView {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.summary = h("summary", {}, "Thinking");
    this.thoughts = h("div", { class: "prose" });
    this.thinking = h("details", { class: "thinking", hidden: true }, this.summary, this.thoughts);
    this.body = h("div", { class: "prose" });
    this.chip = h("span", { class: "chip", hidden: true });
    this.figures = h("span", { class: "figures" });
    this.bar = h("span", {});
    this.progress = h("div", { class: "progress", hidden: true }, this.bar);
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    const copy = iconButton("copy", "Copy the reply", () => copyText(this.message.content, copy));
    const again = iconButton("again", "Answer again", () => this.actions.again(this.message));
    this.buttons = h("div", { class: "actions" }, copy, again);
    this.element = h(
      "article",
      { class: "message reply", "aria-label": "Reply" },
      this.thinking,
      this.body,
      this.problem,
      this.progress,
      h("div", { class: "meta" }, h("div", { class: "meta-words" }, this.chip, this.figures), this.buttons),
    );
    this.markdown = new GrowingMarkdown(this.body);
    this.thoughtText = new GrowingMarkdown(this.thoughts);
  }

  update(message, run) {
    this.message = message;
    this.markdown.update(message.content);
    this.#thinking(message, run);
    this.#problem(message);
    this.element.classList.toggle("running", Boolean(run));
    this.element.classList.toggle("typing", Boolean(run && run.phase === "decode"));
    this.buttons.hidden = Boolean(run) || Boolean(message.error && !message.content);
    if (run) this.#running(run);
    else this.#finished(message);
  }

  #thinking(message, run) {
    this.thinking.hidden = !message.reasoning;
    if (!message.reasoning) return;
    this.thoughtText.update(message.reasoning);
    const busy = run && !message.content;
    const took = message.thoughtMs ? ` for ${seconds(message.thoughtMs)}` : "";
    const words = busy ? "Thinking…" : `Thought${took}`;
    if (this.summary.textContent !== words) this.summary.textContent = words;
  }

  #problem(message) {
    this.problem.hidden = !message.error;
    if (!message.error || this.problem.childElementCount) return;
    const again = h(
      "button",
      { type: "button", class: "button", onclick: () => this.actions.again(this.message) },
      icon("again"),
      "Try again",
    );
    this.problem.append(icon("warn"), h("p", {}, problemText(message.error)), again);
  }

  #running(run) {
    this.chip.hidden = false;
    this.chip.className = `chip phase-${run.phase}`;
    const phase = {
      waiting: "waiting",
      queued: "queued",
      starting: "starting",
      prefill: "prefilling",
      decode: "generating",
    };
    setText(this.chip, phase[run.phase] ?? run.phase);
    setFigures(this.figures, run.phase === "decode" ? decodeWords(run) : waitWords(run));
    const { done, total } = run.prefill;
    this.progress.hidden = run.phase !== "prefill" || !total;
    if (total) this.bar.style.width = `${(100 * done) / total}%`;
  }

  #finished(message) {
    const known = FINISHES[message.finish];
    this.chip.hidden = !known;
    if (known) {
      this.chip.className = `chip finish-${message.finish}`;
      setText(this.chip, known[0]);
      this.chip.title = known[1];
    }
    this.progress.hidden = true;
    setFigures(this.figures, message.figures?.tokens || !message.error ? finalWords(message.figures) : []);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Lines break between figures, not inside one. */
function setFigures(element, words) {
  if (element.textContent === words.join(" · ")) return;
  element.replaceChildren(...words.flatMap((word, at) => [at ? " · " : "", h("span", { class: "figure" }, word)]));
}

function problemText({ status, text, retryAfter }) {
  if (status === 429 || status === 529)
    return `The server is busy${retryAfter ? `; it asks to try again in ${retryAfter} s` : ""}. (${text})`;
  if (status === 401) return "The server asks for its API key: load the page again.";
  return `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

function waitWords(run) {
  const words = [];
  if (run.phase === "queued" && run.ahead) words.push(`${run.ahead} ahead`);
  if (run.promptTokens !== null) {
    words.push(`${count(run.promptTokens)}-token prompt`);
    if (run.cachedTokens) words.push(`${count(run.cachedTokens)} cached`);
    if (run.prefill.total) words.push(`${count(run.prefill.done)}/${count(run.prefill.total)} computed`);
  }
  return [...words, seconds(run.waited)];
}

function decodeWords(run) {
  const words = [`${count(run.tokens)} tok`];
  if (run.speed) words.push(rate(run.speed));
  if (run.firstAt !== null) words.push(`first token ${seconds(run.firstAt - run.began)}`);
  return [...words, ...streamWords(run), seconds(run.waited)];
}

function streamWords({ hitRate, diskRate: disk }) {
  const words = [];
  if (hitRate !== null && hitRate !== undefined) words.push(`cache hits ${percent(hitRate)}`);
  if (disk) words.push(`disk ${diskRate(disk)}`);
  return words;
}

function finalWords(figures) {
  if (!figures) return ["not finished here: it runs in another tab, or was cut off"];
  const words = [];
  if (figures.promptTokens !== null) {
    const cached = figures.cachedTokens ? ` (${count(figures.cachedTokens)} cached)` : "";
    words.push(`${count(figures.promptTokens)} in${cached}`);
  }
  words.push(`${figures.exact ? "" : "about "}${count(figures.tokens)} out`);
  if (figures.speed) words.push(rate(figures.speed));
  if (figures.ttftMs !== null) words.push(`first token ${seconds(figures.ttftMs)}`);
  return [...words, ...streamWords(figures), seconds(figures.totalMs)];
}
