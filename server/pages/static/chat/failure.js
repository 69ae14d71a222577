/** Return {title, message} for an error of a request, for people. */
export function explained(error) {
  const title = TITLES[error.status];
  if (title === undefined) return { title: "The request failed", message: error.message };
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const sentence = error.message.replace(/[.:]?$/, ".");
  const isField = error.param && sentence.startsWith(error.param);
  return {
    title: error.status === 400 && error.param ? `The server refuses ${error.param}` : title,
    message: (isField ? sentence : sentence[0].toUpperCase() + sentence.slice(1)) + later,
  };
}

const TITLES = {
  0: "No connection",
  200: "The answer broke off",
  400: "The server refuses the request",
  401: "An API key is needed",
  403: "Not allowed",
  404: "Not found",
  408: "The request took too long to arrive",
  413: "The request is too large",
  429: "The server is busy",
  500: "The server failed",
  503: "The server is not ready",
};
