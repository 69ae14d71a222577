import { byId, element } from "./dom.js";

/** The images that go with the next message. */
export class Images {
  #urls = [];
  #refusal = "The model is not known yet.";

  constructor() {
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", async event => {
      await this.#add(event.target.files);
      event.target.value = "";
    });
    byId("prompt").addEventListener("paste", event => {
      const files = [...event.clipboardData.files].filter(file => file.type.startsWith("image/"));
      if (!files.length) return;
      event.preventDefault();
      if (this.#refusal) this.#refuse();
      else this.#add(files);
    });
  }

  /** Allow images, or refuse them for a reason. */
  setRefusal(reason) {
    this.#refusal = reason;
    byId("attach").hidden = Boolean(reason);
    if (reason) this.take();
  }

  /** Return the images as data URLs and forget them. */
  take() {
    const urls = this.#urls;
    this.#urls = [];
    this.#show();
    return urls;
  }

  #refuse() {
    byId("notice").textContent = this.#refusal;
  }

  async #add(files) {
    for (const file of files) this.#urls.push(await dataUrl(file));
    this.#show();
  }

  #show() {
    byId("images").replaceChildren(...this.#urls.map((url, index) => element("li", {},
      element("img", { src: url, alt: `Image ${index + 1}` }),
      element("button", { type: "button", "aria-label": `Remove image ${index + 1}`, click: () => this.#remove(index) }, "×"))));
  }

  #remove(index) {
    this.#urls.splice(index, 1);
    this.#show();
    byId("prompt").focus();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
