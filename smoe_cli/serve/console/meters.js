// The two meters of the header: the context window, and the machine's memory.

import { memory } from "./api.js";
import { byId } from "./dom.js";
import { count, gigabytes, percent } from "./format.js";

const EVERY_MS = 2000;

function draw(meter, { share, level, text, title }) {
  meter.hidden = false;
  meter.dataset.level = level;
  meter.title = title;
  meter.setAttribute("aria-valuemax", "100");
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  meter.setAttribute("aria-valuetext", title);
  meter.querySelector(".meter-fill").style.width = `${Math.min(100, share * 100)}%`;
  meter.querySelector(".meter-text").textContent = text;
}

/** Tokens of this conversation against the window; amber from three quarters on. */
export function showContext(used, window) {
  const meter = byId("context-meter");
  if (!window) {
    meter.hidden = true;
    return;
  }
  const share = (used ?? 0) / window;
  const level = share >= 1 ? "high" : share >= 0.75 ? "warm" : "calm";
  const left = Math.max(0, window - (used ?? 0));
  draw(meter, {
    share,
    level,
    text: `${count(used ?? 0)} / ${count(window)}`,
    title:
      `${percent(share)} of the context window used: ` +
      `${count(used ?? 0)} of ${count(window)} tokens, ${count(left)} left`,
  });
}

/** Follows the memory of the machine; `onReach(bool)` says when the server stops and starts to answer. */
export class MemoryMeter {
  constructor(onReach) {
    this.onReach = onReach;
  }

  start() {
    this.#tick();
    document.addEventListener("visibilitychange", () => !document.hidden && this.#look());
  }

  async #tick() {
    await this.#look();
    setTimeout(() => this.#tick(), EVERY_MS);
  }

  async #look() {
    if (document.hidden) return;
    try {
      this.#show(await memory());
      this.onReach(true);
    } catch (error) {
      this.onReach(error.status !== 0, error);
    }
  }

  #show(now) {
    const { total, used, available, engine, pressure } = now;
    const parts = [`${gigabytes(used)} of ${gigabytes(total)} GB used, ${gigabytes(available)} GB available`];
    if (engine) parts.push(`the engine holds ${gigabytes(engine)} GB`);
    parts.push(pressure === "none" ? "no pressure" : `pressure: ${pressure}`);
    draw(byId("ram-meter"), {
      share: used / total,
      level: { some: "warm", high: "warm", critical: "high" }[pressure] ?? "calm",
      text: `${gigabytes(used)} / ${gigabytes(total)} GB`,
      title: parts.join("; "),
    });
  }
}
