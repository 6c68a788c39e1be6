// The login, where the program asks for one.

import { h, redraw, showDialog } from "../common/dom.js";
import { logInAs } from "../common/session.js";
import { said, t, useLanguage } from "../common/words.js";

const LOGIN = new URL("../../../login", import.meta.url);

/** Asks for a name and a password in an element; the page is loaded again with whom they let in. */
export async function showLogin(/** @type {Element} */ root) {
  document.documentElement.lang = await useLanguage(undefined);
  const { form, name } = loginForm(() => location.reload());
  redraw(root, h("main.app.alone", form));
  name.focus();
}

/**
 * Asks for them over the page, which stays; whether they let the person in.
 * @param {string | null} person whose page it is: for another one it is loaded again
 * @returns {Promise<boolean>}
 */
export function askToLogIn(person) {
  return new Promise((resolve) => {
    const { form, name } = loginForm(() => {
      if (person && name.value.trim() !== person) return location.reload();
      resolve(true);
      dialog.close();
    });
    const dialog = h("dialog.dialog.card", { "aria-label": t("Log in") }, form);
    showDialog(dialog);
    dialog.addEventListener("close", () => resolve(false));
    name.focus();
  });
}

function loginForm(/** @type {() => void} */ onDone) {
  const trouble = h("p.refused", { role: "alert" });
  const name = h("input", { required: true, name: "username", autocomplete: "username" });
  const kind = { type: "password", autocomplete: "current-password" };
  const password = h("input", { required: true, name: "password", ...kind });
  const form = h(
    "form.login.card",
    h("h1", "qwen35mm"),
    h("label.block-field.quiet", t("Name"), name),
    h("label.block-field.quiet", t("Password"), password),
    trouble,
    h("button.strong", { type: "submit" }, t("Log in")),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    trouble.textContent = "";
    const how = { method: "POST", headers: { "x-qwen35mm": "1" }, body: new FormData(form) };
    const response = await fetch(LOGIN, how).catch(() => null);
    const problem = response && !response.ok ? (await response.json().catch(() => null))?.error : null;
    if (!response) trouble.textContent = t("The program can't be reached. Is it still running?");
    else if (problem && problem.kind !== "wrong password") trouble.textContent = said(problem.message);
    else if (!response.ok) trouble.textContent = t("Wrong name or password.");
    else if (logInAs(await response.json())) onDone();
    else trouble.textContent = t("This browser doesn't store data for this page. Allow it, then log in again.");
  });
  return { form, name };
}
