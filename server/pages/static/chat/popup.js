import { announce, byId, element } from "./dom.js";
import { percent, visible } from "./format.js";
import { runOf } from "./answer_view.js";

const MAX_TOKENS = 4;  // of a run that are shown

/** Show a token's probability and its alternatives under the pointer, or under the token chosen by arrow keys. */
export function showProbabilities(log) {
  const popup = byId("popup");
  let current = null;

  function show(node) {
    if (node === current) return;
    hide();
    current = node;
    node.classList.add("current");
    popup.replaceChildren(...runOf.get(node).tokens.slice(0, MAX_TOKENS).map(table));
    popup.hidden = false;
    place(popup, node.getClientRects()[0] ?? node.getBoundingClientRect());
  }

  function hide() {
    current?.classList.remove("current");
    current = null;
    popup.hidden = true;
  }

  log.addEventListener("pointerover", event => runOf.has(event.target) ? show(event.target) : hide());
  log.addEventListener("pointerleave", hide);
  log.addEventListener("scroll", hide);
  log.addEventListener("focusout", hide);
  log.addEventListener("keydown", event => {
    const tokens = [...event.target.querySelectorAll(":scope > .token")];
    if (!tokens.length) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape" && current) {
      hide();
      event.stopPropagation();
    } else if (step) {
      const from = tokens.indexOf(current);
      const next = tokens[from < 0 ? 0 : Math.min(tokens.length - 1, Math.max(0, from + step))];
      next.scrollIntoView({ block: "nearest" });
      show(next);
      announce(runOf.get(next).tokens.map(token => `${token.token} ${percent(Math.exp(token.logprob))}`).join(", "));
      event.preventDefault();
    }
  });
}

function table(token) {
  const others = token.top_logprobs.filter(other => !isSame(other, token));
  return element("table", {}, element("tbody", {}, row(token, true), ...others.map(other => row(other, false))));
}

function row(token, isChosen) {
  const probability = Math.exp(token.logprob);
  const bar = element("progress", { max: 1, value: probability, "aria-hidden": "true" });
  return element("tr", { class: isChosen ? "chosen" : null },
    element("td", {}, element("code", {}, visible(token.token))), element("td", {}, bar),
    element("td", { class: "number" }, percent(probability)));
}

function isSame(one, other) {
  return one.token === other.token && one.logprob === other.logprob;
}

/** Put the popup under a rectangle, or above it where there is no room. */
function place(popup, box) {
  const { width, height } = popup.getBoundingClientRect(), gap = 6;
  const below = box.bottom + gap + height <= innerHeight;
  const left = Math.max(gap, Math.min(box.left, innerWidth - width - gap));
  popup.style.left = `${left}px`;
  popup.style.top = `${below ? box.bottom + gap : Math.max(gap, box.top - gap - height)}px`;
}
