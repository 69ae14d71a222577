import { element } from "./dom.js";

/** Return a form that asks for the result of each call and gives them to `onSend` as [{call, content}]. */
export function resultForm(calls, onSend) {
  const inputs = calls.map(call => element("textarea", {
    rows: 2, placeholder: `What ${call.function.name} returned`, "aria-label": `Result of ${call.function.name}`,
  }));
  const button = element("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send results" : "Send result");
  const send = event => {
    event.preventDefault();
    onSend(calls.map((call, index) => ({ call, content: inputs[index].value })));
  };
  return element("form", { class: "result-form", submit: send }, ...inputs, button);
}
