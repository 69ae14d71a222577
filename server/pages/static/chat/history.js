import { announce, byId, element } from "./dom.js";
import { asJson, asMarkdown, download } from "./export.js";
import { StorageFailed, Store } from "./store.js";

const CURRENT = "encore.chat.current";  // the tab's conversation, which a reload opens again

/** The list of kept conversations: open, rename, export, delete. */
export class History {
  #store = new Store();
  #summaries = [];
  #renaming = null;  // the id of the conversation whose title is an input
  #writes = Promise.resolve();  // one at a time, so that an older state never replaces a newer one

  /** `onOpen(kept)` and `onClose()` show a conversation and none; `onRename(kept)` tells the shown one's new title. */
  constructor({ onOpen, onClose, onRename }) {
    Object.assign(this, { onOpen, onClose, onRename });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.#refresh(); });
  }

  get current() {
    return sessionStorage.getItem(CURRENT);
  }

  set current(id) {
    if (id === null) sessionStorage.removeItem(CURRENT);
    else sessionStorage.setItem(CURRENT, id);
    this.#show();
  }

  /** Show the list, and open the conversation that this tab had before it was reloaded. */
  async begin() {
    await this.#refresh();
    if (this.current && !await this.#open(this.current)) this.current = null;
  }

  /** Keep a conversation, which becomes the current one. */
  save(kept) {
    if (this.current !== kept.id) this.current = kept.id;
    return this.#write(async () => {
      await this.#store.put(kept);
      await this.#refresh();
    });
  }

  async #open(id) {
    await this.#writes;
    const kept = await this.#guarded(() => this.#store.get(id));
    if (!kept) return false;
    this.current = id;
    this.onOpen(kept);
    return true;
  }

  async #rename(id, title) {
    this.#renaming = null;
    if (!title.trim()) return this.#show();
    await this.#change(id, kept => ({ ...kept, title: title.trim(), isRenamed: true }));
  }

  #change(id, change) {
    return this.#write(async () => {
      const kept = change(await this.#store.get(id));
      await this.#store.put(kept);
      if (this.current === id) this.onRename(kept);
      await this.#refresh();
    });
  }

  async #delete(id) {
    const kept = await this.#guarded(() => this.#store.get(id));
    if (this.current === id) {
      await this.onClose();
      this.current = null;
    }
    await this.#write(() => this.#store.delete(id));
    await this.#refresh();
    if (kept) this.#offerUndo(kept);
  }

  #offerUndo(kept) {
    const undo = element("button", { type: "button", class: "link", click: async () => {
      byId("notice").replaceChildren();
      await this.#write(() => this.#store.put(kept));
      await this.#refresh();
    } }, "Undo");
    byId("notice").replaceChildren(`Deleted “${kept.title}”. `, undo);
  }

  async #export(id, extension, format) {
    const kept = await this.#guarded(() => this.#store.get(id));
    if (kept) download(kept.title, extension, format(kept));
  }

  #write(work) {
    this.#writes = this.#writes.then(() => this.#guarded(work));
    return this.#writes;
  }

  async #refresh() {
    this.#summaries = await this.#guarded(() => this.#store.list()) ?? [];
    if (!this.#renaming) this.#show();
  }

  /** Return what `work` returns; undefined if the browser's storage fails, which is shown. */
  async #guarded(work) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof StorageFailed)) throw error;
      byId("notice").textContent = error.message;
      return undefined;
    }
  }

  #show() {
    byId("chat-list").replaceChildren(...this.#summaries.map(one => this.#item(one)));
    byId("no-chats").hidden = this.#summaries.length > 0;
  }

  #item({ id, title }) {
    const isCurrent = id === this.current;
    const button = (label, click) => element("button", { type: "button", "aria-label": `${label}: ${title}`, click }, label);
    const name = this.#renaming === id ? this.#titleInput(id, title) : element("button", {
      type: "button", class: "title", title, "aria-current": isCurrent && "true", click: () => this.#choose(id),
    }, title);
    return element("li", { class: isCurrent && "current" }, name, element("div", { class: "actions" },
      button("Rename", () => { this.#renaming = id; this.#show(); byId("chat-list").querySelector("input").select(); }),
      button("Markdown", () => this.#export(id, "md", asMarkdown)),
      button("JSON", () => this.#export(id, "json", asJson)),
      button("Delete", () => this.#delete(id))));
  }

  async #choose(id) {
    await this.onClose();
    if (await this.#open(id)) announce("The chat is open.");
    else await this.#refresh();
  }

  #titleInput(id, title) {
    let isDone = false;
    const finish = value => {
      if (isDone) return;  // removing the input from the page blurs it
      isDone = true;
      this.#rename(id, value);
    };
    return element("input", {
      id: "title-input", value: title, "aria-label": "Title", maxlength: 200,
      blur: event => finish(event.target.value),
      keydown: event => {
        if (event.key === "Enter") finish(event.target.value);
        if (event.key === "Escape") finish("");
        if (event.key === "Escape") event.stopPropagation();
      },
    });
  }
}
