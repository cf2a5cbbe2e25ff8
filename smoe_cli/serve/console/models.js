// The model menu: every vault the server found, with what it is. A choice holds from the next message on.

import { byId, h, icon } from "./dom.js";
import { count } from "./format.js";

export class ModelMenu {
  models = [];
  chosen = null; // id

  /** `onChoose(model)` is called when a person picks another one. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.button = byId("model-button");
    this.menu = byId("model-menu");
    this.button.append(icon("chevron"));
    this.button.addEventListener("click", () => this.#toggle(this.menu.hidden));
    this.button.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") (event.preventDefault(), this.#toggle(true));
    });
    this.menu.addEventListener("keydown", (event) => this.#key(event));
    this.menu.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !this.menu.contains(event.relatedTarget) && event.relatedTarget !== this.button)
        this.#toggle(false);
    });
    document.addEventListener("pointerdown", (event) => {
      if (!this.menu.hidden && !event.target.closest(".model")) this.#toggle(false);
    });
  }

  set(models) {
    this.models = models;
    if (!this.get(this.chosen)) this.chosen = this.active?.id ?? models[0]?.id ?? null;
    this.#draw();
  }

  get(id) {
    return this.models.find((model) => model.id === id) ?? null;
  }

  get active() {
    return this.models.find((model) => model.active) ?? null;
  }

  choose(id) {
    if (!this.get(id)) return;
    this.chosen = id;
    this.#draw();
  }

  #draw() {
    const model = this.get(this.chosen);
    byId("model-name").textContent = model?.id ?? "no model";
    const tag = byId("model-quant");
    tag.hidden = !model?.quant;
    tag.textContent = model?.quant ?? "";
    this.button.title = model ? describe(model).join(" · ") : "The server has found no vault";
    this.menu.replaceChildren(...this.models.map((each) => this.#item(each)));
  }

  #item(model) {
    const chosen = model.id === this.chosen;
    const detail = model.error ?? describe(model).slice(1).join(" · ");
    return h(
      "button",
      {
        type: "button",
        role: "menuitemradio",
        class: "menu-item",
        tabindex: "-1",
        "aria-checked": String(chosen),
        disabled: Boolean(model.error),
        title: lineage(model),
        onclick: () => this.#pick(model),
      },
      h("span", { class: "menu-mark" }, chosen ? icon("check") : null),
      h(
        "span",
        { class: "menu-words" },
        h(
          "span",
          { class: "menu-name" },
          model.id,
          model.quant ? h("span", { class: "tag" }, model.quant) : null,
          model.active ? h("span", { class: "tag live" }, "loaded") : null,
        ),
        h("span", { class: "menu-detail" }, detail),
      ),
    );
  }

  #pick(model) {
    this.#toggle(false);
    this.button.focus();
    if (model.id === this.chosen) return;
    this.chosen = model.id;
    this.#draw();
    this.onChoose(model);
  }

  #toggle(open) {
    this.menu.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    if (open) (this.menu.querySelector('[aria-checked="true"]') ?? this.menu.firstElementChild)?.focus();
  }

  #key(event) {
    const items = [...this.menu.children].filter((item) => !item.disabled);
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === "Escape") {
      event.stopPropagation();
      this.#toggle(false);
      this.button.focus();
    } else if (to !== undefined) {
      event.preventDefault();
      items.at(to % items.length).focus();
    }
  }
}

/** Where a vault comes from, whole: for the tooltip. */
function lineage({ lineage }) {
  if (!lineage) return null;
  const parts = [`made by ${lineage.converter}`, `source ${lineage.source}`, `tokenizer ${lineage.tokenizer}`];
  return parts.filter((part) => !/(null|undefined)$/.test(part)).join("\n");
}

/** What a vault is, in short pieces: name, make, size, where its tokenizer and template come from. */
export function describe(model) {
  const parts = [model.id];
  if (model.model_type) parts.push(model.model_type);
  if (model.moe_layers) parts.push(`${model.moe_layers} layers of ${count(model.experts)} experts`);
  if (model.lineage?.tokenizer) parts.push(`tokenizer ${model.lineage.tokenizer.slice(0, 8)}`);
  return parts;
}
