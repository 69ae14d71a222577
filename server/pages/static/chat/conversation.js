import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { byId, element } from "./dom.js";
import { messagesOf } from "./export.js";

const NEAR_END_PIXELS = 48;
const TITLE_CHARACTERS = 60;

/** The turns so far, in order: what was sent, and the model's answers. Each has a node in the page. */
export class Conversation {
  #turns = [];
  #kept = null;  // {id, title, isRenamed, model, system, created}; null before the first message

  constructor() {
    this.log = byId("log");
    this.scroller = byId("scroller");
  }

  get #last() {
    return this.#turns.at(-1);
  }

  get isEmpty() {
    return !this.#turns.length;
  }

  /** Add the user's message. */
  addUser(text, images) {
    const pictures = images.map(url => element("img", { src: url, alt: "Attached image" }));
    const node = element("li", { class: "user", "aria-label": "Your message" },
      pictures.length ? element("div", { class: "pictures" }, ...pictures) : null, element("div", { class: "text" }, text));
    this.#add({ node, kept: () => ({ kind: "user", text, images }) });
  }

  /** Add the results of tool calls: [{call, content}]. */
  addResults(results) {
    const cards = results.map(({ call, content }) => element("section", { class: "call" },
      element("h3", {}, element("span", { class: "label" }, "Result"), element("code", {}, call.function.name)),
      element("pre", { tabindex: "0" }, content)));
    const node = element("li", { class: "results", "aria-label": "Tool results" }, ...cards);
    this.#add({ node, kept: () => ({ kind: "results", results }) });
  }

  /** Add an answer, whose view fills as it arrives. */
  addAnswer(answer, view) {
    this.#add({ node: view.node, answer, kept: () => ({ kind: "answer", answer: answer.kept() }) });
  }

  /** Remove the last turn if it is an answer. */
  dropAnswer() {
    if (this.#last?.answer) this.#drop();
  }

  /** Remove the last answer and what it answers if it has no text: the next request would repeat the question. */
  dropFailed() {
    if (!this.#last?.answer?.isEmpty) return;
    this.#drop();
    this.#drop();
  }

  /** Make a change; the end of the conversation stays in view if it was. */
  keepAtEnd(change) {
    const { scroller } = this;
    const wasAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PIXELS;
    change();
    if (wasAtEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  clear() {
    while (this.#turns.length) this.#drop();
    this.#kept = null;
  }

  messages() {
    return this.#turns.flatMap(turn => messagesOf(turn.kept()));
  }

  /** Return the conversation for the history. `model` and `system` are those of the last request. */
  kept({ model, system } = {}) {
    const turns = this.#turns.map(turn => turn.kept());
    const created = Date.now();
    // Not crypto.randomUUID, which a page without TLS doesn't have.
    this.#kept ??= { id: `${created.toString(36)}-${Math.random().toString(36).slice(2)}`, created };
    if (model !== undefined) Object.assign(this.#kept, { model, system });
    if (!this.#kept.isRenamed) this.#kept.title = titleOf(turns);
    return { ...this.#kept, changed: Date.now(), turns };
  }

  rename({ title }) {
    Object.assign(this.#kept, { title, isRenamed: true });
  }

  /** Show a conversation of the history. `finish(answer, view)` completes the view of each answer. */
  open({ turns, changed, ...kept }, finish) {
    this.clear();
    for (const turn of turns) {
      if (turn.kind === "user") this.addUser(turn.text, turn.images);
      else if (turn.kind === "results") this.addResults(turn.results);
      else {
        const answer = Answer.opened(turn.answer), view = new AnswerView();
        this.addAnswer(answer, view);
        for (const part of answer.parts()) view.add(part);
        finish(answer, view);
      }
    }
    this.#kept = kept;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #add(turn) {
    this.#turns.push(turn);
    this.log.append(turn.node);
    this.#changed();
  }

  #changed() {
    document.body.classList.toggle("empty", !this.#turns.length);
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #drop() {
    this.#turns.pop().node.remove();
    this.#changed();
  }
}

/** Return the beginning of the first message. */
function titleOf(turns) {
  const line = turns.find(turn => turn.kind === "user")?.text.trim().split("\n", 1)[0] ?? "";
  const characters = [...line];
  return (characters.length > TITLE_CHARACTERS ? characters.slice(0, TITLE_CHARACTERS).join("") + "…" : line) || "Chat";
}
