// The page swaps in its own newer <main>: no flicker, the scroll position stays. Without scripts the whole page reloads.
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
    const left = document.querySelector(".scroll") ? document.querySelector(".scroll").scrollLeft : 0;
    document.querySelector("main").replaceWith(fresh);
    if (document.querySelector(".scroll")) document.querySelector(".scroll").scrollLeft = left;
    note.textContent = "";
  } catch (error) { note.textContent = "Not up to date: " + error.message; }
  asking = false;
}, REFRESH_SECONDS * 1000);
