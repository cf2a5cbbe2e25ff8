// Before the first paint, so that a chosen appearance does not flash the other one. Not a module: those run later.
(() => {
  try {
    const theme = JSON.parse(localStorage.getItem("smoe.settings") || "{}").theme;
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is blocked or holds something else: the system's appearance then.
  }
})();
