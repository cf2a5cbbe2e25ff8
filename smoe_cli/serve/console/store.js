// Conversations and settings, in this browser and nowhere else. One storage key a conversation, so that two tabs do not
// overwrite each other's.
//
// conversation: {id, title, named, created, updated, model, messages, contextTokens, window, wallNoticed}
// message:      {id, role: user|assistant|notice, content, reasoning, model, state, finish, figures, error}
//               state of a reply: running, done, stopped, failed

const PREFIX = "smoe.conversation.";
const SETTINGS = "smoe.settings";

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

export class Store {
  frozen = false; // the page is being left: what happens to its requests then is no news
  #all = new Map();
  #storage;

  /** `onFull` is called when the browser's room for this page is used up. */
  constructor(onFull, storage = safeStorage()) {
    this.onFull = onFull;
    this.#storage = storage;
    for (const key of Object.keys(storage).filter((key) => key.startsWith(PREFIX))) this.#read(key);
  }

  /** Newest first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#all.get(id) ?? null;
  }

  /** Conversations whose title or messages hold all the words. */
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return this.list().filter((conversation) => {
      const hay = [conversation.title, ...conversation.messages.map((m) => m.content)].join("\n").toLowerCase();
      return words.every((word) => hay.includes(word));
    });
  }

  /** Made but not kept before it has a message. */
  create() {
    const now = Date.now();
    return { id: newId(), title: "New conversation", created: now, updated: now, model: null, messages: [] };
  }

  save(conversation, { touch = false } = {}) {
    if (touch) conversation.updated = Date.now();
    this.#all.set(conversation.id, conversation);
    this.#write(PREFIX + conversation.id, conversation);
  }

  remove(id) {
    this.#all.delete(id);
    this.#storage.removeItem(PREFIX + id);
  }

  settings() {
    try {
      return JSON.parse(this.#storage.getItem(SETTINGS) || "{}");
    } catch {
      return {};
    }
  }

  saveSettings(settings) {
    this.#write(SETTINGS, settings);
  }

  exportAll() {
    return JSON.stringify({ format: "smoe-conversations", version: 1, conversations: this.list() }, null, 1);
  }

  /** Returns how many were taken; throws Error, in words, for a file of another kind. */
  importAll(text) {
    let content;
    try {
      content = JSON.parse(text);
    } catch {
      throw new Error("that file is not JSON");
    }
    if (content?.format !== "smoe-conversations" || !Array.isArray(content.conversations)) {
      throw new Error("that file holds no conversations exported from here");
    }
    const whole = content.conversations.map(checked).filter(Boolean);
    whole.forEach((conversation) => this.save(conversation));
    return whole.length;
  }

  /** Another tab changed something; returns the id of the conversation, or null. */
  follow(event) {
    if (!event.key?.startsWith(PREFIX)) return null;
    const id = event.key.slice(PREFIX.length);
    if (event.newValue === null) this.#all.delete(id);
    else this.#read(event.key);
    return id;
  }

  #read(key) {
    try {
      const conversation = checked(JSON.parse(this.#storage.getItem(key)));
      if (conversation) this.#all.set(conversation.id, conversation);
    } catch {
      // Not ours to repair: it stays where it is and is not shown.
    }
  }

  #write(key, value) {
    if (this.frozen) return;
    try {
      this.#storage.setItem(key, JSON.stringify(value));
    } catch {
      this.onFull();
    }
  }
}

/** A conversation from storage or a file with only the fields that are known, or null if it is none. */
function checked(value) {
  if (typeof value?.id !== "string" || !/^[\w-]{1,64}$/.test(value.id) || !Array.isArray(value.messages)) return null;
  const messages = value.messages
    .filter((m) => ["user", "assistant", "notice"].includes(m?.role) && typeof m.content === "string")
    .map((m) => ({ ...m, id: typeof m.id === "string" ? m.id : newId() }));
  return {
    ...value,
    messages,
    title: typeof value.title === "string" ? value.title : "Conversation",
    created: Number(value.created) || Date.now(),
    updated: Number(value.updated) || Date.now(),
  };
}

/** The browser's storage; where it is blocked, one that lasts as long as the page. */
function safeStorage() {
  try {
    localStorage.setItem("smoe.probe", "1");
    localStorage.removeItem("smoe.probe");
    return localStorage;
  } catch {
    const kept = {};
    const methods = {
      getItem: (key) => kept[key] ?? null,
      setItem: (key, value) => void (kept[key] = value),
      removeItem: (key) => void delete kept[key],
    };
    for (const [name, method] of Object.entries(methods)) Object.defineProperty(kept, name, { value: method });
    return kept;
  }
}

/** A conversation as Markdown, for reading elsewhere. */
export function asMarkdown(conversation) {
  const parts = conversation.messages
    .filter((message) => message.role !== "notice")
    .map((message) => `## ${message.role === "user" ? "You" : message.model || "Assistant"}\n\n${message.content}\n`);
  return [`# ${conversation.title}\n`, ...parts].join("\n");
}
