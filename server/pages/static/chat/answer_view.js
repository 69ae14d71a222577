import { element } from "./dom.js";
import { count, duration, indented } from "./format.js";
import { leastProbability } from "./tokens.js";

const ENDS = { length: "token limit reached", abort: "ended by the server", tool_calls: "calls a tool" };
/** Tokens at least this likely are not underlined; the others are, more strongly at each step. */
const STEPS = [0.9, 0.5, 0.2];

/** The runs of tokens that text elements stand for, for the popup. */
export const runOf = new WeakMap();

/** What one answer looks like: reasoning, content, tool calls, an error, figures and buttons. */
export class AnswerView {
  #content = null;
  #reasoning = null;

  constructor() {
    this.body = element("div", { class: "body" }, element("span", { class: "waiting", "aria-label": "waiting" }));
    this.foot = element("footer");
    this.node = element("li", { class: "answer", "aria-label": "Answer" }, this.body, this.foot);
  }

  /** Append a part of Answer.add. */
  add(part) {
    this.body.querySelector(".waiting")?.remove();
    if (part.kind === "call") {
      this.body.append(callCard(part.call));
      return;
    }
    const place = part.kind === "content" ? this.#contentPlace() : this.#reasoningPlace();
    const hasTokens = part.runs.some(run => run.tokens.length);
    if (hasTokens) place.append(...part.runs.map(tokenNode));
    else if (place.lastChild?.nodeType === Node.TEXT_NODE) place.lastChild.appendData(part.text);
    else place.append(part.text);
    if (hasTokens) place.tabIndex = 0;  // the arrow keys go through the tokens
  }

  /** Show the figures of the answer, its error and `buttons`. */
  finish(answer, buttons) {
    this.body.querySelector(".waiting")?.remove();
    if (this.#reasoning && answer.content) this.#reasoning.parentNode.open = false;
    if (answer.isEmpty && !answer.error) this.body.append(element("p", { class: "note" }, "The answer has no text."));
    if (answer.error) this.body.append(errorBox(answer.error));
    this.foot.replaceChildren(figures(answer), element("div", { class: "buttons" }, ...buttons));
  }

  #contentPlace() {
    if (!this.#content?.isConnected || this.#content !== this.body.lastChild) {
      this.#content = element("div", { class: "text" });
      this.body.append(this.#content);
    }
    return this.#content;
  }

  #reasoningPlace() {
    if (!this.#reasoning) {
      this.#reasoning = element("div", { class: "text" });
      const details = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.#reasoning);
      this.body.append(details);
    }
    return this.#reasoning;
  }
}

function tokenNode(run) {
  if (!run.tokens.length) return document.createTextNode(run.text);
  const step = STEPS.filter(least => leastProbability(run) < least).length;
  const node = element("span", { class: `token unlikely-${step}` }, run.text);
  runOf.set(node, run);
  return node;
}

function callCard(call) {
  return element("section", { class: "call", "aria-label": `Call of ${call.function.name}` },
    element("h3", {}, element("span", { class: "label" }, "Tool call"), element("code", {}, call.function.name)),
    element("pre", { tabindex: "0" }, indented(call.function.arguments)));
}

function errorBox(error) {
  return element("section", { class: "error", role: "alert" },
    element("h3", {}, error.title), element("p", {}, error.message));
}

function figures(answer) {
  const shown = [];
  const add = (text, title) => shown.push(element("li", { title }, text));
  if (answer.timeToFirstToken !== null) add(duration(answer.timeToFirstToken) + " to first token", serverTimes(answer));
  if (answer.usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: { cached_tokens: cached } } = answer.usage;
    const known = cached ? ` (${cached} from the prefix cache)` : "";
    add(count(answer.usage.completion_tokens, "token"), `${count(prompt, "prompt token")}${known}`);
  }
  if (answer.tokensPerSecond !== null) add(answer.tokensPerSecond.toFixed(1) + " tokens/s", "after the first token");
  for (const [bucket, tokens] of Object.entries(answer.stats?.graph_buckets ?? {})) {
    if (bucket === "eager") add(`${tokens} prefill or eager`, "tokens that no decode graph produced");
    else add(`graph ${bucket} × ${tokens}`, `${count(tokens, "token")} from replays of the graph for ${bucket} rows`);
  }
  if (answer.stopped) add("stopped");
  else if (ENDS[answer.finishReason]) add(ENDS[answer.finishReason]);
  return element("ul", { class: "figures", "aria-label": "Figures" }, ...shown);
}

function serverTimes({ stats }) {
  if (!stats || stats.first_token_seconds === null) return "measured in the browser";
  const inServer = duration(1000 * stats.first_token_seconds), queued = duration(1000 * (stats.queue_seconds ?? 0));
  return `measured in the browser; in the server ${inServer}, of which ${queued} in the queue`;
}
