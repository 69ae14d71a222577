/** Return a kept conversation as JSON: its messages in OpenAI's format, and where they come from. */
export function asJson({ title, model, created, changed, turns, system }) {
  const messages = turns.flatMap(messagesOf);
  if (system) messages.unshift({ role: "system", content: system });
  const date = time => new Date(time).toISOString();
  return JSON.stringify({ title, model, created: date(created), changed: date(changed), messages }, null, 2) + "\n";
}

/** Return a kept conversation as Markdown. */
export function asMarkdown({ title, model, turns, system }) {
  const parts = [`# ${title}`, model ? `Model: ${model}` : null, system ? section("System", system) : null];
  return [...parts, ...turns.map(markdownOf)].filter(Boolean).join("\n\n") + "\n";
}

/** Let the browser save a text as a file. */
export function download(title, extension, text) {
  const url = URL.createObjectURL(new Blob([text]));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${title.replace(/[^\p{L}\p{N}_-]+/gu, " ").trim().slice(0, 60) || "chat"}.${extension}`;
  link.click();
  URL.revokeObjectURL(url);
}

/** Return the messages that a kept turn stands for in requests. */
export function messagesOf(turn) {
  if (turn.kind === "user") return [{ role: "user", content: userContent(turn.text, turn.images) }];
  if (turn.kind === "results") {
    return turn.results.map(({ call, content }) =>
      ({ role: "tool", tool_call_id: call.id, name: call.function.name, content }));
  }
  const { content, reasoning, calls } = turn.answer;
  if (!content && !reasoning && !calls.length) return [];
  return [{
    role: "assistant", content, ...(reasoning ? { reasoning } : {}), ...(calls.length ? { tool_calls: calls } : {}),
  }];
}

function userContent(text, images) {
  if (!images.length) return text;
  return [...images.map(url => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

function markdownOf(turn) {
  if (turn.kind === "user") return section("User", ...turn.images.map(url => `![image](${url})`), turn.text);
  if (turn.kind === "results") {
    return turn.results.map(({ call, content }) => section(`Result of ${call.function.name}`, fenced(content))).join("\n\n");
  }
  const { content, reasoning, calls, error } = turn.answer;
  return section("Assistant", reasoning ? reasoning.replace(/^/gm, "> ") : null, content,
    ...calls.map(call => `Calls \`${call.function.name}\`:\n\n${fenced(call.function.arguments)}`),
    error ? `Error: ${error.message}` : null);
}

function section(name, ...parts) {
  return [`## ${name}`, ...parts.filter(Boolean)].join("\n\n");
}

/** Return text in a code block, whose fence is longer than every run of backquotes in it. */
function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(run => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}
