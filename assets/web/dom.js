// Small helpers for building the page. Nothing here takes HTML from outside.

/** An element: `h("button.small", {onclick, "aria-label": "..."}, "text", child)`; null children are left out. */
export function h(selector, attributes = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    // The page's policy refuses the attribute.
    if (name === "style") element.style.cssText = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list" && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 6h16M4 12h16M4 18h16",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  again: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  goOn: "M5 12h14M13 6l6 6-6 6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  clip: "M20 12l-8 8a5 5 0 0 1-7-7l9-9a3.5 3.5 0 0 1 5 5l-9 9a2 2 0 0 1-3-3l8-8",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 10a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7",
  close: "M6 6l12 12M18 6L6 18",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M20 20l-4.5-4.5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
};

/** A line drawing; it says nothing to a screen reader. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }))
    svg.setAttribute(key, value);
  return svg;
}

/** A button that is only a drawing, with its words for a screen reader and a pointer that rests on it. */
export function iconButton(name, label, onclick, extra = {}) {
  return h("button.icon-button", { type: "button", title: label, "aria-label": label, onclick, ...extra }, icon(name));
}

/** Calls at most once in `ms`, with the last arguments, after the calls have paused. */
export function debounce(ms, run) {
  let timer = null;
  const later = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...args), ms);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

export function clear(element, ...children) {
  element.replaceChildren(...children.flat().filter(Boolean));
  return element;
}

export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = h("textarea", { style: "position:fixed;opacity:0" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A dialog that closes with Escape; resolves with what its buttons give, or null. */
export function ask(title, body, buttons) {
  return new Promise((resolve) => {
    let answer = null;
    const row = buttons.map(({ label, value, kind }) =>
      h(
        `button.${kind || "plain"}`,
        {
          type: "button",
          onclick: () => {
            answer = typeof value === "function" ? value() : value;
            dialog.close();
          },
        },
        label,
      ),
    );
    const enter = (event) => {
      if (event.key !== "Enter" || event.isComposing || event.target.tagName !== "INPUT") return;
      event.preventDefault();
      row.at(-1).click();
    };
    const dialog = h(
      "dialog.dialog",
      { "aria-label": title, onkeydown: enter },
      h("h2", {}, title),
      ...[body].flat(),
      h("div.dialog-buttons", {}, row),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.querySelector("#qwen35mm .app").append(dialog);
    dialog.showModal();
  });
}
