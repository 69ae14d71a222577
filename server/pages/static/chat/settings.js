const SETTINGS = "encore.chat.settings", KEY = "encore.chat.key";

/** A setting that can't be sent. `field` is the name of its input. */
export class InvalidSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const PARSERS = {
  text: input => input.value.trim() || null,
  flag: input => input.checked || null,
  lines: input => input.value.split("\n").filter(line => line) || null,
  number(input) {
    if (input.validity.badInput) throw new InvalidSetting(input.name, "This is not a number.");
    return input.value === "" ? null : Number(input.value);
  },
  integer(input) {
    const value = PARSERS.number(input);
    if (value !== null && !Number.isSafeInteger(value)) {
      throw new InvalidSetting(input.name, "This must be a whole number below 2⁵³.");
    }
    return value;
  },
  json(input) {
    if (!input.value.trim()) return null;
    try {
      return JSON.parse(input.value);
    } catch (error) {
      throw new InvalidSetting(input.name, `This is not valid JSON: ${error.message}`);
    }
  },
};

/** The settings form. Its values live as long as the tab, in sessionStorage; the key has an entry of its own. */
export class Settings {
  constructor(form) {
    this.form = form;
    const saved = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
    for (const input of this.#inputs()) {
      if (!(input.name in saved)) continue;
      if (input.type === "checkbox") input.checked = saved[input.name];
      else input.value = saved[input.name];
    }
    form.elements.key.value = sessionStorage.getItem(KEY) ?? "";
    form.addEventListener("input", event => {
      this.clearError(event.target);
      this.#save();
    });
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  /** Return the values by input name; empty ones are null. Throws InvalidSetting. */
  read() {
    return Object.fromEntries(this.#inputs().map(input => [input.name, PARSERS[input.dataset.kind](input)]));
  }

  /** Show what the server uses for the values that are left empty. */
  showDefaults(defaults) {
    for (const [name, value] of Object.entries(defaults)) {
      const input = this.form.elements[name];
      if (input?.type === "number") input.placeholder = value;
    }
    document.getElementById("defaults").hidden = !Object.keys(defaults).length;
  }

  reset() {
    const { key } = this;
    this.form.reset();
    this.form.elements.key.value = key;
    for (const input of this.form.elements) this.clearError(input);
    this.#save();
  }

  /** Write an example into an empty or unchanged text field. */
  fill(name, value) {
    const input = this.form.elements[name];
    input.value = JSON.stringify(value, null, 2);
    input.closest("details").open = true;
    this.clearError(input);
    this.#save();
  }

  /** Show a message at a field. Returns the input, or null if no input has this name. */
  showError(name, message) {
    const input = this.form.elements[name];
    if (!(input instanceof HTMLElement)) return null;
    const note = document.getElementById(`${input.id}-error`) ?? document.createElement("p");
    note.id = `${input.id}-error`;
    note.className = "field-error";
    note.textContent = message;
    input.after(note);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", note.id);
    const group = input.closest("details");
    if (group) group.open = true;
    return input;
  }

  clearError(input) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    document.getElementById(`${input.id}-error`)?.remove();
  }

  #inputs() {
    return [...this.form.elements].filter(input => input.dataset.kind);
  }

  #save() {
    const values = this.#inputs().map(input => [input.name, input.type === "checkbox" ? input.checked : input.value]);
    sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
    sessionStorage.setItem(KEY, this.form.elements.key.value);
  }
}
