// The page swaps in its own newer <main>: no flicker, scroll position and unfolded parts stay. Without scripts the whole
// page reloads.
const REFRESH_SECONDS = 2;
const note = document.getElementById("note");
let asking = false;
setInterval(async () => {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
    if (!answer.ok) throw new Error("the server answers " + answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    for (const open of document.querySelectorAll("details[open]")) {
      const same = fresh.querySelector("#" + open.id);
      if (same) same.open = true;
    }
    const focused = document.activeElement.closest("details");
    document.querySelector("main").replaceWith(fresh);
    if (focused) document.querySelector("#" + focused.id + " summary")?.focus({ preventScroll: true });
    note.textContent = "";
  } catch (error) { note.textContent = "Not up to date: " + error.message; }
  asking = false;
}, REFRESH_SECONDS * 1000);
