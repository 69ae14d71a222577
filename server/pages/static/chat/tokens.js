/**
 * Assigns streamed text to the tokens it was made of.
 *
 * Text may come later than its tokens (a character of several tokens, a possible stop string), and some tokens have no
 * text (special tokens, markers of reasoning and tool calls).
 */
export class TokenRuns {
  #pending = [];

  /** Return the next text as runs {text, tokens}: one token each where the texts match, else several together. */
  push(text, tokens) {
    this.#pending.push(...tokens);
    const runs = [];
    while (text && this.#pending.length && this.#pending[0].token && text.startsWith(this.#pending[0].token)) {
      const token = this.#pending.shift();
      runs.push({ text: token.token, tokens: [token] });
      text = text.slice(token.token.length);
    }
    if (text) {
      runs.push({ text, tokens: this.#pending });
      this.#pending = [];
    }
    return runs;
  }

  /** Forget tokens without text. */
  clear() {
    this.#pending = [];
  }
}

/** Return the probability of the least likely token of a run; 1 if it has none. */
export function leastProbability(run) {
  return Math.min(1, ...run.tokens.map(token => Math.exp(token.logprob)));
}
