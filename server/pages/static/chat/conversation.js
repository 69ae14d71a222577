import { byId, element } from "./dom.js";

const NEAR_END_PIXELS = 48;

/** The turns so far, in order: what was sent, and the model's answers. Each has a node in the page and messages. */
export class Conversation {
  #turns = [];

  constructor() {
    this.log = byId("log");
    this.scroller = byId("scroller");
  }

  get #last() {
    return this.#turns.at(-1);
  }

  /** Add the user's message. */
  addUser(text, images) {
    const content = images.length
      ? [...images.map(url => ({ type: "image_url", image_url: { url } })), { type: "text", text }]
      : text;
    const pictures = images.map(url => element("img", { src: url, alt: "Attached image" }));
    const node = element("li", { class: "user", "aria-label": "Your message" },
      pictures.length ? element("div", { class: "pictures" }, ...pictures) : null, element("div", { class: "text" }, text));
    this.#add({ node, messages: () => [{ role: "user", content }] });
  }

  /** Add the results of tool calls: [{call, content}]. */
  addResults(results) {
    const cards = results.map(({ call, content }) => element("section", { class: "call" },
      element("h3", {}, element("span", { class: "label" }, "Result"), element("code", {}, call.function.name)),
      element("pre", { tabindex: "0" }, content)));
    const messages = results.map(({ call, content }) =>
      ({ role: "tool", tool_call_id: call.id, name: call.function.name, content }));
    this.#add({ node: element("li", { class: "results", "aria-label": "Tool results" }, ...cards), messages: () => messages });
  }

  /** Add an answer, whose view fills as it arrives. */
  addAnswer(answer, view) {
    this.#add({ node: view.node, answer, messages: () => answer.isEmpty ? [] : [answer.message()] });
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
  }

  messages() {
    return this.#turns.flatMap(turn => turn.messages());
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
