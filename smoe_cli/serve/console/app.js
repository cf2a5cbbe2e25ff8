// The console: which conversation is open, which replies are coming, and what happens when something is asked for.

import * as api from "./api.js";
import { addNotice, addReply, addTurn, cutFrom, historyOf } from "./conversation.js";
import { byId, download, h, icon, toast } from "./dom.js";
import { count } from "./format.js";
import { MemoryMeter, showContext } from "./meters.js";
import { describe, ModelMenu } from "./models.js";
import { Run } from "./run.js";
import { Sidebar } from "./sidebar.js";
import { asMarkdown, Store } from "./store.js";
import { Transcript } from "./transcript.js";

const CLOCK_MS = 100;
const SAVE_MS = 3000;
const WALL =
  "The context window is full: from here on the oldest messages fall out of it. " +
  "A new conversation starts with an empty one.";

export class App {
  #runs = new Map(); // conversation id -> Run
  #drafts = new Map();
  #painting = false;

  constructor() {
    this.store = new Store(() => toast("This browser has no more room for conversations: export and delete some."));
    this.models = new ModelMenu((model) => this.#modelChosen(model));
    this.transcript = new Transcript(byId("transcript"), byId("scroller"), byId("to-end"), {
      again: (reply) => this.again(reply),
      edit: (message, text) => this.edit(message, text),
    });
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.remove(id),
      export: (id) => this.#export(this.store.get(id)),
      isRunning: (id) => this.#runs.has(id),
      found: (text) => (text.trim() ? this.store.search(text) : this.store.list()),
    });
    this.memory = new MemoryMeter((reached, error) => this.#reach(reached, error));
    setInterval(() => this.#clock(), CLOCK_MS);
    setInterval(() => this.#saveRunning(), SAVE_MS);
  }

  async start() {
    this.open(location.hash.slice(1)) || this.new();
    await this.loadModels();
    this.memory.start();
  }

  get run() {
    return this.#runs.get(this.current.id) ?? null;
  }

  // -- which conversation --

  new() {
    this.#show(this.store.create());
  }

  /** False if there is none of that id. */
  open(id) {
    const conversation = this.store.get(id);
    if (conversation) this.#show(conversation);
    return Boolean(conversation);
  }

  #show(conversation) {
    const prompt = byId("prompt");
    if (this.current) this.#drafts.set(this.current.id, prompt.value);
    this.current = conversation;
    prompt.value = this.#drafts.get(conversation.id) ?? "";
    prompt.dispatchEvent(new Event("input"));
    if (conversation.model) this.models.choose(conversation.model);
    history.replaceState(null, "", conversation.messages.length ? `#${conversation.id}` : location.pathname);
    this.sidebar.slide(false);
    this.draw();
  }

  /** Everything of the open conversation anew. */
  draw() {
    this.transcript.show(this.current, this.run, this.#empty());
    this.sidebar.draw(this.current.id);
    this.#frame();
  }

  #empty() {
    const model = this.models.get(this.models.chosen);
    const words = model ? [model.id, model.quant, ...describe(model).slice(1)].filter(Boolean).join(" · ") : "";
    return h(
      "div",
      { class: "empty" },
      h("p", { class: "empty-title" }, "What would you like to ask?"),
      h("p", { class: "empty-model" }, words),
      h("p", { class: "fine" }, "The model runs on this server. Conversations stay in this browser."),
    );
  }

  /** Title, button and meters: what depends on the reply being there or coming. */
  #frame() {
    const running = Boolean(this.run);
    const title = this.current.messages.length ? this.current.title : "smoe";
    document.title = running ? `… ${title}` : title;
    if (byId("heading").textContent !== title) byId("heading").textContent = title;
    const send = byId("send");
    if (send.dataset.mode !== (running ? "stop" : "send")) {
      send.dataset.mode = running ? "stop" : "send";
      send.replaceChildren(icon(running ? "stop" : "up"));
      send.setAttribute("aria-label", running ? "Stop" : "Send");
      send.title = running ? "Stop (Esc)" : "Send (Enter)";
    }
    const chosen = this.models.get(this.models.chosen);
    showContext(
      this.run?.contextTokens ?? this.current.contextTokens,
      this.run?.window ?? chosen?.max_model_len ?? this.current.window,
    );
  }

  // -- replies --

  send(text) {
    if (this.run || !text.trim()) return false;
    const reply = addTurn(this.current, text, this.models.chosen);
    this.#go(reply);
    return true;
  }

  stop() {
    this.run?.stop();
  }

  /** Answer the last message again. */
  again(reply = this.current.messages.findLast((message) => message.role === "assistant")) {
    if (this.run || !reply) return;
    const before = [...this.current.messages];
    cutFrom(this.current, reply);
    const asked = this.current.messages.findLast((message) => message.role === "user");
    delete asked.unanswered;
    this.#go(addReply(this.current, this.models.chosen));
    if (reply.content) this.#offerUndo("Answering again.", before);
  }

  /** Send another text in the place of a message; what came after it goes. */
  edit(message, text) {
    if (this.run) return toast("Stop the running reply first.");
    const before = [...this.current.messages];
    cutFrom(this.current, message);
    this.#go(addTurn(this.current, text, this.models.chosen));
    this.#offerUndo("The message was edited.", before);
  }

  editLast() {
    const last = this.current.messages.findLast((message) => message.role === "user");
    if (last && !this.run) this.transcript.edit(last.id);
  }

  #offerUndo(words, messages) {
    const conversation = this.current;
    toast(
      words,
      [
        "Undo",
        () => {
          this.#runs.get(conversation.id)?.stop();
          this.#runs.delete(conversation.id);
          conversation.messages = messages;
          this.store.save(conversation);
          this.#show(conversation);
        },
      ],
      10,
    );
  }

  async #go(reply) {
    const conversation = this.current;
    const settings = this.store.settings();
    const body = { model: this.models.chosen ?? undefined, messages: historyOf(conversation, reply, settings.system) };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"])
      if (Number.isFinite(settings[name])) body[name] = settings[name];
    if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
    body.max_tokens ??= this.#room(conversation);
    conversation.model = this.models.chosen;
    const run = new Run(reply, body, {
      change: () => this.#paint(conversation),
      notice: (text) => toast(text, null, 12),
      model: (id) => this.#answeredBy(conversation, body.model, id),
    });
    this.#runs.set(conversation.id, run);
    this.store.save(conversation, { touch: true });
    history.replaceState(null, "", `#${conversation.id}`);
    this.draw();
    announce("Waiting for the reply");
    await run.go();
    if (this.#runs.get(conversation.id) === run) this.#over(conversation, run);
  }

  /** What the window has left for a reply, or a quarter of it; without a limit the server's own holds, and is short. */
  #room(conversation) {
    const window = this.models.get(this.models.chosen)?.max_model_len ?? conversation.window;
    return window ? Math.max(window - (conversation.contextTokens ?? 0), Math.ceil(window / 4)) : undefined;
  }

  #over(conversation, run) {
    this.#runs.delete(conversation.id);
    conversation.contextTokens = run.contextTokens ?? conversation.contextTokens;
    conversation.window = run.window ?? conversation.window;
    const full = run.slides || (conversation.window && conversation.contextTokens >= conversation.window);
    if (full && !conversation.wallNoticed) {
      conversation.wallNoticed = true;
      addNotice(conversation, WALL);
    }
    this.store.save(conversation, { touch: true });
    if (conversation === this.current) {
      const added = conversation.messages.at(-1).id !== run.message.id;
      if (added) this.draw();
      this.transcript.live(run);
      this.#frame();
    }
    this.sidebar.draw(this.current.id);
    announce(
      { done: "The reply is finished", stopped: "The reply was stopped", failed: "The reply failed" }[run.phase],
    );
    this.loadModels();
  }

  /** At most once a frame, however many tokens come. */
  #paint(conversation) {
    if (conversation !== this.current || this.#painting) return;
    this.#painting = true;
    requestAnimationFrame(() => {
      this.#painting = false;
      this.#clock();
    });
  }

  #clock() {
    if (!this.run || document.hidden) return;
    this.transcript.live(this.run);
    this.#frame();
  }

  #saveRunning() {
    for (const id of this.#runs.keys()) this.store.save(this.store.get(id));
  }

  // -- models and server --

  async loadModels() {
    try {
      const empty = !this.models.models.length;
      this.models.set(await api.models());
      if (empty && this.current.model) this.models.choose(this.current.model);
      if (!this.current.messages.length) this.draw();
      else this.#frame();
    } catch (error) {
      this.#reach(error.status !== 0, error);
    }
  }

  #modelChosen(model) {
    const wait = model.active ? "" : " It has to be loaded first, so its first reply takes longer.";
    const text = `${model.id} answers from the next message on.${wait}`;
    if (this.current.messages.length) {
      addNotice(this.current, text, "model");
      this.store.save(this.current);
    } else {
      toast(text);
    }
    announce(text);
    this.draw();
  }

  #answeredBy(conversation, asked, id) {
    if (asked && asked !== id) toast(`${id} is answering: the server has no ${asked}.`);
  }

  #reach(reached, error) {
    const banner = byId("offline");
    const locked = reached && error?.status === 401;
    const words = locked
      ? "The server asks for its API key: load the page again."
      : "The server does not answer. Is smoe serve still running? Trying again…";
    if (reached && !locked && !banner.hidden) this.loadModels();
    if (!reached || locked) banner.textContent = words;
    banner.hidden = reached && !locked;
  }

  // -- the list --

  #rename(id, title) {
    const conversation = this.store.get(id);
    Object.assign(conversation, { title, named: true });
    this.store.save(conversation);
    this.#frame();
  }

  remove(id) {
    const conversation = this.store.get(id);
    this.#runs.get(id)?.stop();
    this.#runs.delete(id);
    this.store.remove(id);
    if (id === this.current.id) this.new();
    else this.sidebar.draw(this.current.id);
    toast(
      `“${conversation.title}” was deleted.`,
      [
        "Undo",
        () => {
          this.store.save(conversation);
          this.open(id);
        },
      ],
      10,
    );
  }

  #export(conversation) {
    const name =
      conversation.title
        .replace(/[^\p{L}\p{N}]+/gu, "-")
        .replace(/^-|-$/g, "")
        .slice(0, 60) || "conversation";
    download(`${name}.md`, asMarkdown(conversation), "text/markdown");
  }

  exportAll() {
    download("smoe-conversations.json", this.store.exportAll(), "application/json");
  }

  async importAll(file) {
    try {
      const taken = this.store.importAll(await file.text());
      this.sidebar.draw(this.current.id);
      toast(`${count(taken)} conversation${taken === 1 ? "" : "s"} imported.`);
    } catch (error) {
      toast(`Nothing was imported: ${error.message}.`);
    }
  }

  /** The page is left, or comes back from the browser's memory. */
  leave(leaving) {
    if (leaving) this.#saveRunning();
    this.store.frozen = leaving;
  }

  /** Another tab changed a conversation. */
  follow(event) {
    const id = this.store.follow(event);
    if (id === null || this.#runs.has(id)) return;
    if (id === this.current.id && this.store.get(id)) this.current = this.store.get(id);
    if (id === this.current.id) this.draw();
    else this.sidebar.draw(this.current.id);
  }
}

function announce(text) {
  byId("status").textContent = text;
}
