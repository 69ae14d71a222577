import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { RequestFailed, streamChat } from "./api.js";
import { announce, byId } from "./dom.js";
import { explained } from "./failure.js";
import { requestBody } from "./request.js";
import { InvalidSetting } from "./settings.js";

const SAVE_MILLISECONDS = 2000;  // what a reload loses of an answer

/** Sends the conversation and writes the answer into it; one at a time. */
export class Exchange {
  #controller = null;

  /** `onChange()` is called when the request is sent, and every few seconds while the answer arrives. */
  constructor({ settings, connection, conversation, panel, onChange }) {
    Object.assign(this, { settings, connection, conversation, panel, onChange });
  }

  get isRunning() {
    return this.#controller !== null;
  }

  stop() {
    this.#controller?.abort();
  }

  /** Return a function from messages to the request's body; null if a setting can't be sent, which is shown. */
  prepare() {
    try {
      const values = this.settings.read(), { model } = this.connection;
      requestBody(model, values, []);
      return messages => requestBody(model, values, messages);
    } catch (error) {
      if (!(error instanceof InvalidSetting)) throw error;
      this.panel.reveal(this.settings.showError(error.field, error.message));
      announce(error.message);
      return null;
    }
  }

  /** Add an answer to the conversation. `makeBody` is what `prepare` returned. Returns {answer, view}. */
  async run(makeBody) {
    const body = makeBody(this.conversation.messages());
    const answer = new Answer(), view = new AnswerView(), controller = new AbortController();
    this.conversation.addAnswer(answer, view);
    this.#setController(controller);
    this.onChange();
    const saving = setInterval(this.onChange, SAVE_MILLISECONDS);
    // Hundreds of chunks a second are written once per frame: each change of the page costs a layout.
    let parts = [], frame = null;
    const write = () => {
      this.conversation.keepAtEnd(() => parts.forEach(part => view.add(part)));
      parts = [];
      frame = null;
    };
    try {
      for await (const chunk of streamChat(body, this.settings.key, controller.signal)) {
        parts.push(...answer.add(chunk));
        frame ??= requestAnimationFrame(write);
      }
      announce("The answer is complete.");
    } catch (error) {
      if (controller.signal.aborted) answer.stopped = true;
      else if (error instanceof RequestFailed) this.#fail(answer, error);
      else throw error;
    } finally {
      clearInterval(saving);
      cancelAnimationFrame(frame);
      write();
      this.#setController(null);
    }
    return { answer, view };
  }

  #fail(answer, error) {
    answer.error = explained(error);
    const input = this.#cause(error);
    if (input) this.panel.reveal(input);
  }

  /** Show the error at the setting that it is about, and return its input. */
  #cause(error) {
    if (error.status === 401) return this.settings.showError("key", error.message);
    if (error.status !== 400 || !error.param) return null;
    const { extra } = this.settings.form.elements;
    return this.settings.showError(error.param, error.message)
      ?? (extra.value.includes(`"${error.param}"`) ? this.settings.showError("extra", error.message) : null);
  }

  #setController(controller) {
    this.#controller = controller;
    byId("send").hidden = this.isRunning;
    byId("stop").hidden = !this.isRunning;
    byId("log").setAttribute("aria-busy", String(this.isRunning));
  }
}
