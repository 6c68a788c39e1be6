// Swagger UI over the server's document. Where the server has keys, one is asked for; only this page's memory keeps it.

const form = /** @type {HTMLFormElement} */ (document.querySelector("form"));
const input = /** @type {HTMLInputElement} */ (form.querySelector("input"));
const problem = /** @type {HTMLElement} */ (form.querySelector("[role=alert]"));
const { SwaggerUIBundle } = /** @type {any} */ (globalThis);
const url = new URL("openapi.json", location.href).href;

/** Shows the document, or asks for a key. */
async function show(key = "") {
  /** @type {Record<string, string>} */
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const { status } = await fetch(url, { headers });
  form.hidden = status !== 401;
  if (!form.hidden) {
    problem.textContent = key && "Wrong key";
    input.focus();
    return;
  }
  SwaggerUIBundle({
    url,
    dom_id: "#document",
    deepLinking: true,
    // Its list of schemas is longer than all operations: closed.
    defaultModelsExpandDepth: 0,
    // It is a page of Swagger's, which would be told the document's address.
    validatorUrl: null,
    // The page's policy lets requests go to this server alone.
    requestInterceptor: (/** @type {{ headers: Record<string, string> }} */ request) => {
      Object.assign(request.headers, headers);
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  show(input.value);
});
show();
