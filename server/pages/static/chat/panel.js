import { byId } from "./dom.js";

/** A panel beside the conversation where the window is wide enough (`query`), else over it. */
export class Panel {
  #node;
  #toggle;
  #close;
  #wide;

  /** `name` is the id of the panel; its buttons have the ids `toggle` and `close`. */
  constructor(name, toggle, close, query) {
    this.#node = byId(name);
    this.#toggle = byId(toggle);
    this.#close = byId(close);
    this.#wide = matchMedia(query);
    this.#toggle.addEventListener("click", () => this.show(this.#node.hidden));
    this.#close.addEventListener("click", () => this.#closeByUser());
    this.#node.addEventListener("keydown", event => {
      if (event.key === "Escape" && !this.#wide.matches) this.#closeByUser();
    });
    this.#wide.addEventListener("change", () => this.show(this.#wide.matches));
    this.show(this.#wide.matches);
  }

  show(isShown) {
    this.#node.hidden = !isShown;
    this.#toggle.setAttribute("aria-expanded", String(isShown));
    const covers = isShown && !this.#wide.matches;
    this.#node.classList.toggle("over", covers);
    byId("chat").inert = document.querySelector(".panel.over:not([hidden])") !== null;
    if (covers) this.#close.focus();
  }

  /** Hide the panel if it covers the conversation. */
  uncover() {
    if (this.#node.classList.contains("over")) this.show(false);
  }

  /** Make an input visible and focus it. */
  reveal(input) {
    this.show(true);
    input.focus();
    input.scrollIntoView({ block: "center" });
  }

  #closeByUser() {
    this.show(false);
    this.#toggle.focus();
  }
}
