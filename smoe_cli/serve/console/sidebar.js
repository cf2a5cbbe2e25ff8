// The list of conversations: choose, search, rename, export, delete. Arrow keys move in it, F2 renames, Delete deletes.

import { byId, h, icon, iconButton } from "./dom.js";
import { when } from "./format.js";

export class Sidebar {
  #focused = null; // id of the row that Tab reaches

  /** `actions`: open(id), rename(id, title), remove(id), export(id), isRunning(id), found(text) -> conversations. */
  constructor(actions) {
    this.actions = actions;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw(this.current));
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") (event.preventDefault(), this.#focusRow(0));
      if (event.key === "Escape" && this.search.value) {
        event.stopPropagation();
        this.search.value = "";
        this.draw(this.current);
      }
    });
    this.list.addEventListener("keydown", (event) => this.#key(event));
    byId("open-sidebar").append(icon("menu"));
    byId("open-sidebar").addEventListener("click", () => this.slide(!document.body.classList.contains("sidebar-open")));
    byId("scrim").addEventListener("click", () => this.slide(false));
  }

  /** On a narrow window the sidebar slides over the page. */
  slide(open) {
    document.body.classList.toggle("sidebar-open", open);
    byId("scrim").hidden = !open;
    byId("open-sidebar").setAttribute("aria-expanded", String(open));
    if (open) this.search.focus({ preventScroll: true });
  }

  draw(current) {
    this.current = current;
    const hadFocus = this.list.contains(document.activeElement);
    const found = this.actions.found(this.search.value);
    if (!found.some((conversation) => conversation.id === this.#focused)) this.#focused = null;
    this.#focused ??= found.find((conversation) => conversation.id === current)?.id ?? found[0]?.id ?? null;
    const rows = found.map((conversation) => this.#row(conversation));
    const none = this.search.value
      ? "Nothing found."
      : "Conversations you have will be listed here. They are kept in this browser only.";
    this.list.replaceChildren(...(rows.length ? rows : [h("p", { class: "none" }, none)]));
    if (hadFocus) this.list.querySelector('.row-title[tabindex="0"]')?.focus();
  }

  #row(conversation) {
    const { id, title, updated } = conversation;
    const current = id === this.current;
    const reach = id === this.#focused ? "0" : "-1";
    const open = h(
      "button",
      {
        type: "button",
        class: "row-title",
        tabindex: reach,
        "aria-current": current ? "page" : null,
        title,
        onclick: () => this.actions.open(id),
        ondblclick: () => this.#rename(row, conversation),
      },
      h("span", { class: "row-name" }, title),
      h("span", { class: "row-when" }, this.actions.isRunning(id) ? "answering…" : when(updated)),
    );
    const buttons = [
      iconButton("edit", `Rename ${title} (F2)`, () => this.#rename(row, conversation)),
      iconButton("save", `Export ${title} as Markdown`, () => this.actions.export(id)),
      iconButton("trash", `Delete ${title}`, () => this.actions.remove(id)),
    ];
    buttons.forEach((button) => button.setAttribute("tabindex", reach));
    const row = h(
      "div",
      { class: current ? "row current" : "row", "data-id": id },
      open,
      h("span", { class: "row-actions" }, ...buttons),
    );
    return row;
  }

  #rename(row, { id, title }) {
    const input = h("input", { class: "row-rename", "aria-label": "New title", maxlength: "120" });
    input.value = title;
    let over = false;
    const end = (keep) => {
      if (over) return;
      over = true;
      if (keep && input.value.trim()) this.actions.rename(id, input.value.trim());
      this.#focused = id;
      this.draw(this.current);
      this.list.querySelector('.row-title[tabindex="0"]')?.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
  }

  #key(event) {
    const row = event.target.closest(".row");
    if (!row || event.target.tagName === "INPUT") return;
    const rows = [...this.list.querySelectorAll(".row")];
    const at = rows.indexOf(row);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.#focusRow(Math.min(Math.max(to, 0), rows.length - 1));
    } else if (event.key === "F2") {
      row.querySelector('[aria-label^="Rename"]').click();
    } else if (event.key === "Delete") {
      this.actions.remove(row.dataset.id);
    }
  }

  #focusRow(index) {
    const rows = [...this.list.querySelectorAll(".row")];
    if (!rows[index]) return;
    for (const row of rows)
      row.querySelectorAll("button").forEach((b) => b.setAttribute("tabindex", row === rows[index] ? "0" : "-1"));
    this.#focused = rows[index].dataset.id;
    rows[index].querySelector(".row-title").focus();
  }
}
