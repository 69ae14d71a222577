import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { Exchange } from "./exchange.js";
import { History } from "./history.js";
import { Images } from "./images.js";
import { Panel } from "./panel.js";
import { showProbabilities } from "./popup.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS } from "./request.js";
import { Settings } from "./settings.js";
import { resultForm } from "./tool_results.js";
import { showWarmup } from "./warmup.js";

const prompt = byId("prompt");
const COPIED_MILLISECONDS = 1500;

const settings = new Settings(byId("form"));
const panel = new Panel("settings", "toggle", "close", "(min-width: 60rem)");
const chats = new Panel("chats", "chats-toggle", "chats-close", "(min-width: 76rem)");
const images = new Images();
const conversation = new Conversation();
const connection = new Connection(settings, {
  onModel: model => {
    settings.showDefaults(model.sampling_defaults);
    images.setRefusal(model.input_modalities.includes("image") ? null : `${model.id} takes text only, no images.`);
  },
  onKeyNeeded: message => panel.reveal(settings.showError("key", message)),
});
const exchange = new Exchange({ settings, connection, conversation, panel, onChange: save });
const history = new History({
  onOpen: kept => {
    conversation.open(kept, finish);
    chats.uncover();
    prompt.focus();
  },
  onClose: leave,
  onRename: kept => conversation.rename(kept),
});
let asking = Promise.resolve();  // the answer that arrives

/** Ask for an answer after `change` to the conversation, which is not made if a setting can't be sent. */
function ask(change) {
  const makeBody = exchange.prepare();
  if (exchange.isRunning || !makeBody) return;
  change();
  asking = answered(makeBody);
}

async function answered(makeBody) {
  const { answer, view } = await exchange.run(makeBody);
  await save();  // first, so that an answer that looks complete survives a reload
  conversation.keepAtEnd(() => finish(answer, view));
}

function finish(answer, view) {
  view.finish(answer, buttons(answer));
  if (answer.calls.length && !answer.error) {
    view.body.append(resultForm(answer.calls, results => ask(() => conversation.addResults(results))));
  }
}

function save() {
  const system = settings.form.elements.system.value.trim() || null;
  return history.save(conversation.kept({ model: connection.model ?? byId("name").textContent, system }));
}

/** Stop the answer, keep the conversation, and show none. */
async function leave() {
  exchange.stop();
  await asking;
  conversation.clear();
}

function send() {
  const text = prompt.value.trim();
  if (!text) return;
  ask(() => {
    conversation.dropFailed();
    conversation.addUser(text, images.take());
    prompt.value = "";
    byId("notice").textContent = "";
  });
}

function buttons(answer) {
  const again = () => ask(() => conversation.dropAnswer());
  const label = answer.error ? "Retry" : "Regenerate";
  const retry = element("button", { type: "button", class: "retry", click: again }, label);
  return answer.content && navigator.clipboard ? [copyButton(answer.content), retry] : [retry];  // needs TLS or localhost
}

function copyButton(text) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MILLISECONDS);
  });
  return button;
}

byId("composer").addEventListener("submit", event => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  exchange.stop();
  prompt.focus();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") exchange.stop();
});
byId("new").addEventListener("click", async () => {
  await leave();
  history.current = null;
  chats.uncover();
  prompt.focus();
});
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => {
    prompt.value = example.textContent;
    send();
  });
}
byId("reset").addEventListener("click", () => settings.reset());
byId("example-tools").addEventListener("click", () => settings.fill("tools", EXAMPLE_TOOLS));
byId("example-schema").addEventListener("click", () => settings.fill("response_format", EXAMPLE_SCHEMA));

showProbabilities(byId("scroller"));
connection.connect();
showWarmup();
history.begin();
