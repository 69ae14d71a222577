import { TokenRuns } from "./tokens.js";

/** One answer of the model, built from the chunks of its stream. */
export class Answer {
  content = "";
  reasoning = "";
  calls = [];  // tool calls in OpenAI's format
  finishReason = null;
  usage = null;
  stats = null;
  stopped = false;
  error = null;
  #runs = new TokenRuns();
  #started = performance.now();
  #first = null;
  #last = null;

  /** Add a chunk. Returns its parts in order: {kind: "content" | "reasoning", text, runs} or {kind: "call", call}. */
  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.stats = chunk.stats ?? this.stats;
    const [choice] = chunk.choices;
    if (choice?.index !== 0) return [];  // only the first of several choices is shown
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    return this.#parts(choice.delta, choice.logprobs?.content ?? []);
  }

  #parts(delta, tokens) {
    const parts = [];
    for (const kind of ["reasoning", "content"]) {
      const text = delta[kind] ?? "";
      const runs = this.#runs.push(text, parts.length ? [] : tokens);
      if (text) parts.push({ kind, text, runs });
      this[kind] += text;
      tokens = [];
    }
    for (const { id, type, function: called } of delta.tool_calls ?? []) {
      const call = { id, type, function: called };
      this.calls.push(call);
      parts.push({ kind: "call", call });
      this.#runs.clear();
    }
    return parts;
  }

  /** Return the parts of the whole answer, without its tokens. */
  parts() {
    const texts = ["reasoning", "content"].filter(kind => this[kind])
      .map(kind => ({ kind, text: this[kind], runs: [{ text: this[kind], tokens: [] }] }));
    return [...texts, ...this.calls.map(call => ({ kind: "call", call }))];
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** Milliseconds from the request to its first token, as seen here; null before it. */
  get timeToFirstToken() {
    return this.#first === null ? null : this.#first - this.#started;
  }

  /** Tokens per second after the first one; null if there is no second one. */
  get tokensPerSecond() {
    const tokens = this.usage?.completion_tokens ?? 0, seconds = (this.#last - this.#first) / 1000;
    return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
  }

  /** Return the answer for the history. One that is still streamed counts as stopped. */
  kept() {
    const { content, reasoning, calls, finishReason, usage, stats, error } = this;
    const stopped = this.stopped || (finishReason === null && error === null);
    const times = { started: 0, first: this.timeToFirstToken, last: this.#last === null ? null : this.#last - this.#started };
    return { content, reasoning, calls, finishReason, usage, stats, error, stopped, times };
  }

  /** Return the answer that `kept` was made of. */
  static opened({ times, ...fields }) {
    const answer = Object.assign(new Answer(), fields);
    answer.#started = times.started;
    answer.#first = times.first;
    answer.#last = times.last;
    return answer;
  }
}
