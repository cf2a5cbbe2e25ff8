// Where the page comes alive: buttons, keys and dialogs are joined to the application.

import { App } from "./app.js";
import { byId, h, icon } from "./dom.js";

const app = new App();

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "new line"],
  ["Esc", "stop the reply"],
  ["↑", "edit the last message, from an empty box"],
  ["/", "to the message box"],
  ["Alt R", "answer again"],
  ["Alt M", "choose the model"],
  ["Ctrl K", "search conversations"],
  ["Ctrl Shift O", "new conversation"],
  ["F2", "rename, in the list"],
  ["Delete", "delete, in the list"],
  ["?", "this list"],
];

// -- the message box --

const prompt = byId("prompt");
const roomy = matchMedia("(hover: hover)");

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.isComposing) return; // Enter takes a suggestion of an input method
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (!app.run) byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !prompt.value) {
    event.preventDefault();
    app.editLast();
  }
});

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (app.run) return app.stop();
  if (app.send(prompt.value)) prompt.value = "";
  fit();
  if (roomy.matches) prompt.focus();
  else prompt.blur(); // the reply needs the room that the keyboard of a phone takes
});

// -- buttons --

for (const [id, name, words] of [
  ["new-chat", "plus", "New"],
  ["export-all", "save", "Export all"],
  ["import", "load", "Import"],
  ["open-keys", "keys", ""],
  ["open-settings", "gear", ""],
]) {
  byId(id).append(icon(name), words);
}

const startNew = () => {
  app.new();
  prompt.focus();
};

byId("new-chat").addEventListener("click", startNew);
byId("export-all").addEventListener("click", () => app.exportAll());
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) app.importAll(file);
  event.target.value = "";
});

// -- settings --

const settings = byId("settings");
const form = settings.querySelector("form");
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

byId("open-settings").addEventListener("click", () => {
  const held = app.store.settings();
  for (const name of ["system", "thinking", "theme", ...NUMBERS]) form.elements[name].value = held[name] ?? "";
  settings.showModal();
});

settings.addEventListener("close", () => {
  if (settings.returnValue !== "save") return;
  const held = Object.fromEntries(
    ["system", "thinking", "theme"].map((name) => [name, form.elements[name].value.trim()]),
  );
  for (const name of NUMBERS) if (form.elements[name].value !== "") held[name] = Number(form.elements[name].value);
  app.store.saveSettings(held);
  if (held.theme) document.documentElement.dataset.theme = held.theme;
  else delete document.documentElement.dataset.theme;
});

settings.addEventListener("keydown", (event) => {
  if (event.key === "Escape") settings.returnValue = "";
});

// -- keys --

byId("key-list").append(
  ...KEYS.flatMap(([keys, what]) => [
    h("dt", {}, ...keys.split(" ").flatMap((key) => [h("kbd", {}, key), " "])),
    h("dd", {}, what),
  ]),
);
byId("open-keys").addEventListener("click", () => byId("keys").showModal());

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const writing = event.target.matches("input, textarea, select");
  const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
  const command = event.ctrlKey || event.metaKey;
  const act = {
    escape: () => (document.body.classList.contains("sidebar-open") ? app.sidebar.slide(false) : app.stop()),
    find: () => (app.sidebar.slide(matchMedia("(max-width: 800px)").matches), byId("search").focus()),
    fresh: startNew,
    again: () => app.again(),
    model: () => byId("model-button").click(),
    prompt: () => prompt.focus(),
    help: () => byId("keys").showModal(),
  }[wish(event, plain, command, writing)];
  if (!act) return;
  event.preventDefault();
  act();
});

function wish(event, plain, command, writing) {
  if (event.key === "Escape") return "escape";
  if (command && !event.shiftKey && event.code === "KeyK") return "find";
  if (command && event.shiftKey && event.code === "KeyO") return "fresh";
  if (event.altKey && !command && event.code === "KeyR") return "again";
  if (event.altKey && !command && event.code === "KeyM") return "model";
  if (plain && !writing && event.key === "/") return "prompt";
  if (plain && !writing && event.key === "?") return "help";
  return null;
}

addEventListener("storage", (event) => app.follow(event));
addEventListener("pagehide", () => app.leave(true));
addEventListener("pageshow", () => app.leave(false));
addEventListener("hashchange", () => app.open(location.hash.slice(1)));

app.start();
if (roomy.matches) prompt.focus(); // on a phone that would open the keyboard
