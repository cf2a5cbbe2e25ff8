// Elements from values. Nothing here, or anywhere in the console, parses a string as HTML; the page's
// Content-Security-Policy (require-trusted-types-for) makes the browser refuse it too.

/** h("button", {class: "quiet", onclick: f, "aria-label": "Copy"}, "text", node, null): null children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h10",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4.5v5M7 14.5v5",
  keys: "M3 7h18v10H3zM7 10.5h0M10.5 10.5h0M14 10.5h0M17.5 10.5h0M8 14h8",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  trash: "M4 7h16M9 7V4h6v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  save: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  load: "M12 16V5M7 9.5l5-5 5 5M5 20h14",
  chevron: "M8 10l4 4 4-4",
  warn: "M12 4L2.5 20h19zM12 10v4.5M12 17.2h0",
};

/** A line icon; the button around it carries the words. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", `icon-${name}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** A small button with an icon only. */
export function iconButton(name, label, onclick) {
  return h("button", { type: "button", class: "icon small", "aria-label": label, title: label, onclick }, icon(name));
}

/** A line that goes away by itself, with at most one action ("Undo"). */
export function toast(text, action = null, seconds = 6) {
  const line = h("div", { class: "toast" }, h("span", {}, text));
  const remove = () => line.remove();
  if (action) {
    const [label, run] = action;
    line.append(h("button", { type: "button", class: "link", onclick: () => (remove(), run()) }, label));
  }
  byId("toasts").append(line);
  setTimeout(remove, seconds * 1000);
}

/** Text to the clipboard; the button shows for a moment that it worked. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    if (!copyBySelection(text)) return toast("The browser did not allow copying.");
  }
  const shown = button.querySelector("svg");
  shown.replaceWith(icon("check"));
  setTimeout(() => button.querySelector("svg").replaceWith(shown), 1200);
}

/** The way that works without a secure context, which a page on another machine's plain address is not. */
function copyBySelection(text) {
  const box = h("textarea", { class: "hidden", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** A file for the person to keep. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
