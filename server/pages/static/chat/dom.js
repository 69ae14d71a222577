/** Create an element. Attributes that are null or false are left out; functions become event listeners. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null));
  return node;
}

export const byId = id => document.getElementById(id);

/** Tell screen readers what happened. */
export function announce(text) {
  byId("announcer").textContent = text;
}
