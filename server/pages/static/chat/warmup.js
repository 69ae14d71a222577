import { byId } from "./dom.js";

const POLL_MILLISECONDS = 1000;

/** Show how many graphs are captured, until the server has captured those that it captures ahead. */
export async function showWarmup() {
  for (;;) {
    const warm = document.hidden ? null : await progress();
    const total = warm ? warm.captured + warm.pending : 0;
    const isWarming = Boolean(warm?.pending) && warm.mode !== "lazy";
    if (warm) byId("warmup").hidden = !isWarming;
    if (isWarming) {
      byId("warmup-text").textContent = `${warm.captured} of ${total} graphs captured`;
      byId("warmup-bar").max = total;
      byId("warmup-bar").value = warm.captured;
    } else if (warm && "pending" in warm) {
      return;
    }
    await new Promise(resolve => setTimeout(resolve, POLL_MILLISECONDS));
  }
}

/** Return the warm-up part of GET /ready, which is empty while the model loads; null if it can't be asked. */
async function progress() {
  try {
    const response = await fetch("ready", { cache: "no-store" });
    return (await response.json()).warm ?? null;
  } catch {
    return null;
  }
}
