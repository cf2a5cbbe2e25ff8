// Markdown to elements: what models write, not every corner of the specification. HTML in it is text, images are links
// (nothing is fetched from elsewhere), and every node is made by hand.

import { copyText, h, icon } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 10; // quotes in lists in quotes; deeper is shown as text

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const DELIMITER_ROW = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** All of a text at once, into nodes. */
export const markdown = (text) => blocks(toLines(text), 0).map((block) => block.node);

/** A reply that grows: blocks that can no longer change are left alone, the last one is made again. */
export class GrowingMarkdown {
  #root;
  #text = "";
  #settled = 0; // characters whose blocks are final
  #open = null; // the node of the last block

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text.slice(0, this.#settled))) this.#clear();
    this.#text = text;
    const parsed = blocks(toLines(text.slice(this.#settled)), 0);
    this.#open?.remove();
    this.#root.append(...parsed.map((block) => block.node));
    this.#open = parsed.at(-1)?.node ?? null;
    this.#settled += parsed.at(-1)?.start ?? 0;
  }

  #clear() {
    this.#root.replaceChildren();
    this.#settled = 0;
    this.#open = null;
  }
}

/** [{text, start}]: lines with their place in the text; leading tabs as spaces. */
function toLines(text) {
  let start = 0;
  return text.split("\n").map((raw) => {
    const line = { text: raw.replace(/\r$/, "").replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")), start };
    start += raw.length + 1;
    return line;
  });
}

/** [{node, start}] of the lines, in order. */
function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { node, next } = block(lines, at, depth);
    found.push({ node, start: lines[at].start });
    at = next;
  }
  return found;
}

const isBlank = (line) => line.text.trim() === "";
const indentOf = (line) => line.text.length - line.text.trimStart().length;
const cut = (line, width) => ({ ...line, text: line.text.slice(Math.min(width, indentOf(line))) });

function block(lines, at, depth) {
  const { text } = lines[at];
  if (FENCE.test(text)) return fence(lines, at);
  if (HEADING.test(text)) return heading(lines, at);
  if (RULE.test(text)) return { node: h("hr"), next: at + 1 };
  if (depth < MAX_DEPTH && QUOTE.test(text)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(text)) return list(lines, at, depth);
  if (startsTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fence(lines, at) {
  const [, marks, info] = lines[at].text.match(FENCE);
  const indent = indentOf(lines[at]);
  const close = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}[ \\t]*$`);
  let next = at + 1;
  while (next < lines.length && !close.test(lines[next].text)) next += 1;
  const code = lines
    .slice(at + 1, next)
    .map((line) => cut(line, indent).text)
    .join("\n");
  return { node: codeBlock(code, info.trim().split(/\s/)[0]), next: next + 1 };
}

function codeBlock(code, info) {
  const language = /^[\w+#.-]{1,24}$/.test(info) ? info : "";
  const copy = h("button", { type: "button", class: "quiet small" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyText(code, copy));
  const pre = h("pre", { tabindex: "0" }, h("code", {}, ...highlight(code, language)));
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "text"), copy), pre);
}

/** A reply's own headings stand below the page's. */
function heading(lines, at) {
  const { text } = lines[at];
  const [whole, marks] = text.match(HEADING);
  const words = text.slice(whole.length).trim();
  const bare = words.replace(/#+$/, "");
  const title = bare === "" || /[ \t]$/.test(bare) ? bare.trim() : words;
  return {
    node: h(`h${Math.min(6, marks.length + 2)}`, { class: `h${marks.length}` }, ...inline(title)),
    next: at + 1,
  };
}

function quote(lines, at, depth) {
  let next = at;
  const inner = [];
  for (; next < lines.length && !isBlank(lines[next]); next += 1) {
    if (!QUOTE.test(lines[next].text) && startsBlock(lines, next)) break;
    inner.push({ ...lines[next], text: lines[next].text.replace(QUOTE, "") });
  }
  return { node: h("blockquote", {}, ...blocks(inner, depth + 1).map((block) => block.node)), next };
}

const kindOf = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);

/** Items of one kind of marker. Models indent by two, three or four: two more than the marker is inside. */
function list(lines, at, depth) {
  const [, , first] = lines[at].text.match(ITEM);
  const node = /\d/.test(first) ? h("ol", { start: parseInt(first, 10) }) : h("ul");
  let next = at;
  let loose = false;
  while (next < lines.length) {
    const match = lines[next].text.match(ITEM);
    if (!match || kindOf(match[2]) !== kindOf(first) || RULE.test(lines[next].text)) break;
    const item = itemLines(lines, next, match);
    loose ||= item.loose;
    node.append(listItem(item.inner, depth));
    next = item.next;
  }
  if (!loose) node.setAttribute("class", "tight");
  return { node, next };
}

/** The lines of one item with its marker and indentation taken away, and where the next thing begins. */
function itemLines(lines, at, match) {
  const outer = match[1].length;
  const width = match[0].length;
  const inner = [{ ...lines[at], text: lines[at].text.slice(width) }];
  let next = at + 1;
  let loose = false;
  while (next < lines.length) {
    if (isBlank(lines[next])) {
      let after = next;
      while (after < lines.length && isBlank(lines[after])) after += 1;
      const more = after < lines.length && (indentOf(lines[after]) >= outer + 2 || ITEM.test(lines[after].text));
      if (!more) return { inner, next: after, loose };
      loose = true;
      if (indentOf(lines[after]) < outer + 2) return { inner, next: after, loose };
      inner.push(...lines.slice(next, after));
      next = after;
      continue;
    }
    const inside = indentOf(lines[next]) >= outer + 2;
    if (!inside && startsBlock(lines, next)) break;
    inner.push(cut(lines[next], width));
    next += 1;
  }
  return { inner, next, loose };
}

function listItem(inner, depth) {
  const task = inner[0].text.match(/^\[([ xX])\] /);
  if (task) inner[0] = { ...inner[0], text: inner[0].text.slice(4) };
  const item = h("li", {}, ...blocks(inner, depth + 1).map((block) => block.node));
  if (task) {
    const box = h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
    (item.firstElementChild?.tagName === "P" ? item.firstElementChild : item).prepend(box, " ");
    item.setAttribute("class", "task");
  }
  return item;
}

const startsTable = (lines, at) =>
  lines[at].text.includes("|") &&
  at + 1 < lines.length &&
  lines[at + 1].text.includes("-") &&
  DELIMITER_ROW.test(lines[at + 1].text) &&
  cells(lines[at].text).length === cells(lines[at + 1].text).length;

/** The cells of a row; a bar after a backslash is text. */
function cells(row) {
  const inside = row
    .trim()
    .replace(/^\|/, "")
    .replace(/(^|[^\\])\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  const alignments = cells(lines[at + 1].text).map((cell) => alignment(cell));
  const row = (text, tag) =>
    h("tr", {}, ...alignments.map((align, column) => h(tag, { class: align }, ...inline(cells(text)[column] ?? ""))));
  const body = h("tbody");
  let next = at + 2;
  for (; next < lines.length && !isBlank(lines[next]) && lines[next].text.includes("|"); next += 1) {
    body.append(row(lines[next].text, "td"));
  }
  const node = h("table", {}, h("thead", {}, row(lines[at].text, "th")), body);
  return { node: h("div", { class: "table", tabindex: "0" }, node), next };
}

function alignment(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "middle" : "right";
  return null;
}

/** Line ends inside a paragraph are kept: models break lines where they mean it. */
function paragraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !(depth < MAX_DEPTH && startsBlock(lines, next))) next += 1;
  const text = lines
    .slice(at, next)
    .map((line) => line.text.trim())
    .join("\n");
  return { node: h("p", {}, ...inline(text)), next };
}

function startsBlock(lines, at) {
  const { text } = lines[at];
  if (FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || startsTable(lines, at))
    return true;
  return ITEM.test(text);
}
