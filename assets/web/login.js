// The login, where the program asks for one.

import { clear, h } from "./dom.js";
import { t, useLanguage } from "./words.js";

const LOGIN = new URL("../../login", import.meta.url);

/** Asks for a name and a password in `element`; the page is loaded again with whom they let in. */
export async function showLogin(element) {
  await useLanguage();
  const trouble = h("p.refused", { role: "alert" });
  const field = (label, attributes) => h("label", {}, label, h("input", { required: true, ...attributes }));
  const form = h(
    "form.login",
    {},
    h("h1", {}, "qwen35mm"),
    field(t("Name"), { name: "username", autocomplete: "username" }),
    field(t("Password"), { name: "password", type: "password", autocomplete: "current-password" }),
    trouble,
    h("button.primary", { type: "submit" }, t("Log in")),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    trouble.textContent = "";
    const response = await fetch(LOGIN, { method: "POST", body: new FormData(form) }).catch(() => null);
    if (response?.ok) location.reload();
    else if (response) trouble.textContent = t("This name and this password don't let you in.");
    else trouble.textContent = t("The program can't be reached. Is it still running?");
  });
  clear(element, h("div.app.alone", {}, form));
  form.querySelector("input").focus();
}
