export function duration(milliseconds) {
  if (milliseconds >= 10_000) return (milliseconds / 1000).toFixed(1) + " s";
  if (milliseconds >= 1000) return (milliseconds / 1000).toFixed(2) + " s";
  return milliseconds >= 100 ? milliseconds.toFixed(0) + " ms" : milliseconds.toFixed(1) + " ms";
}

export function count(number, noun) {
  return number.toLocaleString("en-US") + " " + noun + (number === 1 ? "" : "s");
}

/** Format a probability so that small ones differ from 0 and large ones from 1. */
export function percent(probability) {
  const value = 100 * probability;
  if (value >= 99.95) return value === 100 ? "100%" : ">99.9%";
  return value >= 10 ? value.toFixed(1) + "%" : value >= 0.01 ? value.toFixed(2) + "%" : "<0.01%";
}

/** Spell a token so that white space is visible. */
export function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "(no text)";
}

/** Indent JSON; text that is not JSON is returned as it is. */
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
