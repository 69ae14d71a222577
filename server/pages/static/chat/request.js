import { InvalidSetting } from "./settings.js";

const SAMPLING = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty",
  "repetition_penalty",
];

/** Return the body of a streamed chat request. `values` are those of Settings.read. Throws InvalidSetting. */
export function requestBody(model, values, messages) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, return_stats: true };
  if (values.system) body.messages = [{ role: "system", content: values.system }, ...messages];
  for (const name of SAMPLING) if (values[name] !== null) body[name] = values[name];
  if (values.stop.length) body.stop = values.stop;
  if (values.enable_thinking) body.enable_thinking = values.enable_thinking === "on";
  if (values.tools) {
    if (!Array.isArray(values.tools)) throw new InvalidSetting("tools", "This must be a list of tools: [ … ].");
    body.tools = values.tools;
    if (values.tool_choice) body.tool_choice = values.tool_choice;
  }
  if (values.response_format) {
    const schema = { name: "answer", schema: values.response_format, strict: true };
    body.response_format = { type: "json_schema", json_schema: schema };
  }
  if (values.logprobs) {
    body.logprobs = true;
    body.top_logprobs = values.top_logprobs ?? 0;
  }
  if (values.extra !== null) {
    if (Object.prototype.toString.call(values.extra) !== "[object Object]") {
      throw new InvalidSetting("extra", "This must be an object: { … }.");
    }
    Object.assign(body, values.extra, { stream: true });
  }
  return body;
}

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  },
];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" } },
  required: ["name", "year"],
  additionalProperties: false,
};
