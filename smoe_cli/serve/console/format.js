// Numbers as people read them.

export const count = (n) => Math.round(n).toLocaleString("en-US");

export function seconds(ms) {
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 60) return `${s.toFixed(1)} s`;
  return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
}

export const rate = (perSecond) => `${perSecond.toFixed(perSecond < 10 ? 2 : 1)} tok/s`;
export const percent = (share) => `${(share * 100).toFixed(share >= 0.995 || share === 0 ? 0 : 1)}%`;
/** In powers of 1024, as the rest of smoe writes memory. */
export const gigabytes = (bytes) => (bytes / 1024 ** 3).toFixed(bytes < 1024 ** 3 ? 2 : 1);
export const diskRate = (perSecond) =>
  perSecond < 1e8 ? `${(perSecond / 1e6).toFixed(1)} MB/s` : `${(perSecond / 1e9).toFixed(2)} GB/s`;

/** "14:05" today, else the day. */
export function when(ms) {
  const date = new Date(ms);
  const today = new Date().toDateString() === date.toDateString();
  return today
    ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString([], { day: "numeric", month: "short" });
}
