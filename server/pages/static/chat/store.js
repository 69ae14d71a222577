/** Conversations can't be kept. The message says why, for people. */
export class StorageFailed extends Error {}

const SUMMARIES = "summaries", CONVERSATIONS = "conversations";

/** Conversations in the browser's IndexedDB, of this server's origin. Summaries are apart, since images are large. */
export class Store {
  #database = null;

  /** Return {id, title, changed} of each conversation, the newest first. */
  async list() {
    const found = await this.#run("readonly", stores => stores[SUMMARIES].getAll());
    return found.sort((one, other) => other.changed - one.changed);
  }

  /** Return a conversation; undefined if it was deleted. */
  get(id) {
    return this.#run("readonly", stores => stores[CONVERSATIONS].get(id));
  }

  put(conversation) {
    const { id, title, changed } = conversation;
    return this.#run("readwrite", stores => {
      stores[SUMMARIES].put({ id, title, changed });
      return stores[CONVERSATIONS].put(conversation);
    });
  }

  delete(id) {
    return this.#run("readwrite", stores => {
      stores[SUMMARIES].delete(id);
      return stores[CONVERSATIONS].delete(id);
    });
  }

  /** Return the result of the request that `work` makes, after its transaction is complete. Throws StorageFailed. */
  async #run(mode, work) {
    try {
      this.#database ??= opened();
      const transaction = (await this.#database).transaction([SUMMARIES, CONVERSATIONS], mode);
      const stores = Object.fromEntries([SUMMARIES, CONVERSATIONS].map(name => [name, transaction.objectStore(name)]));
      const request = work(stores);
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      return request.result;
    } catch (error) {
      if (error?.name === "QuotaExceededError") {
        throw new StorageFailed("The browser's storage is full: export and delete chats, so that new ones are kept.");
      }
      this.#database = null;  // ask again: the browser may have closed it
      throw new StorageFailed(`The browser does not keep chats: ${error?.message ?? "its storage is closed"}`);
    }
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("encore.chat", 1);
    request.onupgradeneeded = () => {
      for (const name of [SUMMARIES, CONVERSATIONS]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
