// What is done to a conversation: pure changes of its messages, without the page.

import { newId } from "./store.js";

const TITLE_LENGTH = 60;

export function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line || "Conversation";
}

/** Add a person's message and the empty reply to it, which is returned. */
export function addTurn(conversation, text, model) {
  leaveFailedTurn(conversation);
  if (!conversation.named && !conversation.messages.some((message) => message.role === "user")) {
    conversation.title = titleOf(text);
  }
  conversation.messages.push({ id: newId(), role: "user", content: text });
  return addReply(conversation, model);
}

export function addReply(conversation, model) {
  const reply = { id: newId(), role: "assistant", content: "", model, state: "running" };
  conversation.messages.push(reply);
  return reply;
}

/** A line of the console's own; one that says what will answer replaces the one before it. */
export function addNotice(conversation, text, kind = "") {
  const last = conversation.messages.at(-1);
  if (kind && last?.role === "notice" && last.kind === kind) last.content = text;
  else conversation.messages.push({ id: newId(), role: "notice", content: text, kind });
}

/** Take out a message and all that follows; returns what was taken. */
export function cutFrom(conversation, message) {
  const at = conversation.messages.findIndex((each) => each.id === message.id);
  return at < 0 ? [] : conversation.messages.splice(at);
}

/** A turn that failed without a word of reply stays visible but is not sent again: two messages of a person in a row
 * are refused by many templates. */
function leaveFailedTurn(conversation) {
  const said = conversation.messages.filter((message) => message.role !== "notice");
  const [asked, reply] = said.slice(-2);
  if (reply?.role === "assistant" && isSilent(reply) && asked?.role === "user") asked.unanswered = true;
}

const isSilent = (reply) => !reply.content && !reply.reasoning;

/** The messages a request carries: those before `reply`, after the system message. */
export function historyOf(conversation, reply, system) {
  const history = system ? [{ role: "system", content: system }] : [];
  for (const message of conversation.messages) {
    if (message.id === reply.id) break;
    if (message.role === "notice" || message.unanswered) continue;
    if (message.role === "user") history.push({ role: "user", content: message.content });
    else if (!isSilent(message)) history.push(assistant(message));
  }
  return history;
}

function assistant({ content, reasoning }) {
  return reasoning ? { role: "assistant", content, reasoning_content: reasoning } : { role: "assistant", content };
}
