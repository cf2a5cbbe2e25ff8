// The inside of a Markdown block: emphasis, code, links. Everything else, HTML included, is text.

import { h } from "./dom.js";

const PUNCTUATION = /[!"#$%&'*+,\-./:;<=>?@^_`{|}~]/; // brackets after a backslash stay: that is how models write TeX
const LABEL_LIMIT = 2000; // how far a link's closing bracket is looked for
const BARE_LINK = /https?:\/\/[^\s<>"'`\u0000-\u001f]+/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*"|\s+'[^']*')?\s*\)/y;

/** The nodes of a text. */
export function inline(text) {
  return resolve(scan(text));
}

/** An address worth a link, or null: only kinds that cannot run anything. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, ...children) {
  const href = safeAddress(address);
  if (!href) return h("span", { title: address }, ...children);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}

/** Text to pieces: strings, nodes, and marks ({mark, size, opens, closes}) that may turn out to be emphasis. */
function scan(text) {
  const pieces = [];
  const ticks = tickRuns(text);
  let plain = "";
  const push = (piece) => {
    if (plain) pieces.push(plain);
    plain = "";
    pieces.push(piece);
  };
  for (let at = 0; at < text.length;) {
    const special = at === 0 || text[at] !== "h" || !/\w/.test(text[at - 1]) ? found(text, at, ticks) : null;
    if (special) {
      push(special.piece);
      at = special.next;
    } else if (text[at] === "\\" && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) {
      plain += text[at + 1];
      at += 2;
    } else {
      const run = text[at] === "`" ? /`+/y : null;
      const taken = run ? match(run, text, at)[0] : text[at];
      plain += taken;
      at += taken.length;
    }
  }
  if (plain) pieces.push(plain);
  return pieces;
}

/** What begins at a character, if anything: {piece, next}. */
function found(text, at, ticks) {
  switch (text[at]) {
    case "\n":
      return { piece: h("br"), next: at + 1 };
    case "`":
      return code(text, at, ticks);
    case "<":
      return angleLink(text, at);
    case "h":
      return bareLink(text, at);
    case "!":
      return text[at + 1] === "[" ? bracketLink(text, at + 1, true) : null;
    case "[":
      return bracketLink(text, at, false);
    case "*":
    case "_":
    case "~":
      return mark(text, at);
    default:
      return null;
  }
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** Where runs of back quotes of each length begin, so that a run without a partner is not searched for again. */
function tickRuns(text) {
  const runs = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!runs.has(run[0].length)) runs.set(run[0].length, []);
    runs.get(run[0].length).push(run.index);
  }
  for (const places of runs.values()) places.reverse();
  return runs;
}

function code(text, at, ticks) {
  const size = match(/`+/y, text, at)[0].length;
  const places = ticks.get(size);
  while (places.length && places.at(-1) <= at) places.pop();
  if (!places.length) return null;
  const end = places.pop();
  let inside = text.slice(at + size, end).replaceAll("\n", " ");
  if (/^ .* $/.test(inside) && inside.trim()) inside = inside.slice(1, -1);
  return { piece: h("code", {}, inside), next: end + size };
}

function angleLink(text, at) {
  const hit = match(ANGLE_LINK, text, at);
  return hit && { piece: link(hit[1], hit[1].replace(/^mailto:/, "")), next: at + hit[0].length };
}

function bareLink(text, at) {
  const hit = match(BARE_LINK, text, at);
  if (!hit) return null;
  let address = hit[0].replace(/[.,;:!?*_~]+$/, "");
  // A closing bracket belongs to the sentence unless it was opened inside the address.
  while (address.endsWith(")") && address.split("(").length < address.split(")").length) address = address.slice(0, -1);
  return { piece: link(address, address), next: at + address.length };
}

/** [text](address); an image becomes a link to it. */
function bracketLink(text, at, image) {
  const close = closing(text, at);
  if (close < 0 || text[close + 1] !== "(") return null;
  const target = match(TARGET, text, close + 1);
  if (!target) return null;
  const label = text.slice(at + 1, close);
  const children = image ? [`image: ${label || target[1]}`] : resolve(scan(label));
  return { piece: link(target[1], ...children), next: close + 1 + target[0].length };
}

function closing(text, at) {
  const limit = Math.min(text.length, at + LABEL_LIMIT);
  for (let end = at + 1; end < limit; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[" || (text[end] === "\n" && text[end + 1] === "\n")) return -1;
    else if (text[end] === "]") return end;
  }
  return -1;
}

/** A run of *, _ or ~ and whether it may open or close, by what stands on its two sides. */
function mark(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  const before = text[at - 1] ?? " ";
  const after = text[end] ?? " ";
  const space = (c) => /\s/.test(c);
  const punctuation = (c) => /[\p{P}\p{S}]/u.test(c);
  const left = !space(after) && (!punctuation(after) || space(before) || punctuation(before));
  const right = !space(before) && (!punctuation(before) || space(after) || punctuation(after));
  const word = text[at] === "_"; // snake_case is not emphasis
  const opens = left && (!word || !right || punctuation(before));
  const closes = right && (!word || !left || punctuation(after));
  return { piece: { mark: text[at], size: end - at, opens, closes }, next: end };
}

/** Pieces to nodes: each closing mark takes the nearest opening one of its kind. */
function resolve(pieces) {
  const out = [];
  const openers = { "*": [], _: [], "~": [] }; // places in out, the nearest last
  for (const piece of pieces) {
    if (!piece.mark) {
      out.push(piece);
      continue;
    }
    let left = piece.size;
    const mine = openers[piece.mark];
    while (piece.closes && left > 0 && mine.length) {
      const taken = wrap(out, mine, openers, piece.mark, left);
      if (!taken) break;
      left -= taken;
    }
    if (left > 0) {
      if (piece.opens) mine.push(out.length);
      out.push({ ...piece, size: left });
    }
  }
  return out.map((piece) => (piece.mark ? piece.mark.repeat(piece.size) : piece));
}

/** Wrap what follows the nearest opener; returns how many marks of the closing run that took. */
function wrap(out, mine, openers, kind, available) {
  const place = mine.at(-1);
  const opener = out[place];
  const size = kind === "~" ? 2 : Math.min(2, opener.size, available);
  if (opener.size < size || available < size) return 0;
  const inside = out.splice(place + 1).map((piece) => (piece.mark ? piece.mark.repeat(piece.size) : piece));
  for (const places of Object.values(openers)) while (places.length && places.at(-1) > place) places.pop();
  opener.size -= size;
  if (opener.size === 0) {
    mine.pop();
    out.pop();
  }
  const tag = kind === "~" ? "del" : size === 2 ? "strong" : "em";
  out.push(h(tag, {}, ...inside));
  return size;
}
