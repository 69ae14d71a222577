import { chatRefusal, listModels, RequestFailed } from "./api.js";
import { byId, element } from "./dom.js";
import { explained } from "./failure.js";

const RETRY_MILLISECONDS = 2000;  // while the model loads

const REMEDIES = {
  "no tokenizer": "POST /v1/completions and /generate take token ids.",
  "no chat template": "POST /v1/completions continues a text.",
};

/** The server's models, asked for when the page opens and when the key changes. */
export class Connection {
  #timer = null;

  /** `onModel(model)` and `onKeyNeeded(message)` are called with the result. */
  constructor(settings, { onModel, onKeyNeeded }) {
    Object.assign(this, { settings, onModel, onKeyNeeded });
    settings.form.elements.key.addEventListener("change", () => this.connect());
  }

  /** The chosen model's name; null if it is not known, which stands for the served model. */
  get model() {
    return byId("model").value || null;
  }

  async connect() {
    clearTimeout(this.#timer);
    try {
      const models = await listModels(this.settings.key);
      this.#show(models, await chatRefusal(this.settings.key));
    } catch (error) {
      if (!(error instanceof RequestFailed)) throw error;
      const { title, message } = explained(error);
      show(title, message);
      if (error.status === 401) this.onKeyNeeded(message);
      else this.#timer = setTimeout(() => this.connect(), RETRY_MILLISECONDS);
    }
  }

  #show(models, refusal) {
    const [model] = models;
    byId("model").replaceChildren(...models.map(one => element("option", {}, one.id)));
    byId("model").hidden = models.length < 2;
    byId("name").hidden = models.length > 1;
    byId("name").textContent = model.id;
    document.title = `${model.id} · Chat · Encore`;
    const context = `Context of ${model.max_model_len.toLocaleString("en-US")} tokens.`;
    show(model.id, refusal ? `${model.id} has ${refusal}, so it can't chat. ${REMEDIES[refusal]}` : context);
    document.body.classList.toggle("no-chat", refusal !== null);
    this.onModel(model);
  }
}

function show(title, about) {
  byId("title").textContent = title;
  byId("about").textContent = about;
}
