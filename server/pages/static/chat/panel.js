import { byId } from "./dom.js";

const wide = matchMedia("(min-width: 60rem)");

/** Show and hide the settings: beside the conversation where there is room, else over it. */
export class Panel {
  #node = byId("settings");
  #toggle = byId("toggle");

  constructor() {
    this.#toggle.addEventListener("click", () => this.show(this.#node.hidden));
    byId("close").addEventListener("click", () => this.#closeByUser());
    this.#node.addEventListener("keydown", event => {
      if (event.key === "Escape" && !wide.matches) this.#closeByUser();
    });
    wide.addEventListener("change", () => this.show(wide.matches));
    this.show(wide.matches);
  }

  show(isShown) {
    this.#node.hidden = !isShown;
    this.#toggle.setAttribute("aria-expanded", String(isShown));
    const covers = isShown && !wide.matches;
    byId("chat").inert = covers;
    if (covers) byId("close").focus();
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
