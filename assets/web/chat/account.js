// Who is logged in: log out, another password, and what the browser keeps of people.

/** @import { Account } from "../common/types.d.ts" */

import { Problem, postTo } from "../common/api.js";
import { ask, h, iconButton } from "../common/dom.js";
import { endSession, GUEST, keepSession, otherTabs, PERSON, SESSION } from "../common/session.js";
import { t } from "../common/words.js";
import { browserStorage } from "../compose/drafts.js";
import { askToLogIn } from "./login.js";

const KEPT = "qwen35mm-";
const MIN_CHARS = 8;

/** Forgets what the browser keeps of another person, such as what was written and not sent. */
export function keepFor(/** @type {Account | null} */ account) {
  const storage = browserStorage();
  if (!account || !storage) return;
  // Other tabs of the browser log out along with one.
  otherTabs().addEventListener("message", () => location.reload());
  const before = storage.getItem(PERSON);
  if (before && before !== account.name) forgetAll();
  if (account.name) storage.setItem(PERSON, account.name);
}

/** The person whose data the browser keeps; null where that isn't known. */
export const personKept = () => browserStorage()?.getItem(PERSON) ?? null;

function forgetAll() {
  const storage = browserStorage();
  for (const key of Object.keys(storage ?? {}))
    if (key.startsWith(KEPT) && key !== SESSION && key !== GUEST) storage?.removeItem(key);
}

/** The button that leads to a person's account, and a guest to the login. */
export function accountButton(/** @type {Account} */ { name, can_change: canChange }) {
  if (name === null) {
    const logIn = async () => (await askToLogIn(null)) && location.reload();
    return iconButton("person", t("Log in"), logIn);
  }
  const choose = async () => {
    /** @type {{ label: string, kind?: string, value: () => () => unknown }[]} */
    const choices = [
      { label: t("Cancel"), value: () => () => {} },
      { label: t("Log out everywhere"), value: () => () => logOut(true) },
      { label: t("Log out"), kind: "strong", value: () => () => logOut(false) },
    ];
    if (canChange) choices.splice(1, 0, { label: t("Change password"), value: () => () => changePassword() });
    const chosen = await ask(name, h("p.quiet", t("You are logged in as {name}.", { name })), choices);
    await chosen?.();
  };
  return iconButton("person", t("Account of {name}", { name }), choose);
}

async function logOut(/** @type {boolean} */ everywhere) {
  await postTo("logout", { everywhere });
  forgetAll();
  endSession();
  otherTabs().postMessage(null);
  location.reload();
}

/** Asks for the old password and a new one, until they are taken or nothing is to be changed. */
async function changePassword(trouble = "") {
  const field = (/** @type {string} */ label, /** @type {AutoFill} */ autocomplete) =>
    h("label.block-field.quiet", label, h("input", { type: "password", autocomplete }));
  const rows = [
    field(t("Old password"), "current-password"),
    field(t("New password"), "new-password"),
    field(t("Repeat new password"), "new-password"),
  ];
  const body = h("div.passwords", rows, h("p.refused", { role: "alert" }, trouble));
  const isWanted = await ask(t("Change password"), body, [
    { label: t("Cancel"), value: () => false },
    { label: t("Change password"), kind: "strong", value: () => true },
  ]);
  if (!isWanted) return;
  const [old, fresh, again] = rows.map((row) => row.querySelector("input")?.value ?? "");
  const problem = fresh === again ? await taken(old, fresh) : t("The new passwords don't match.");
  if (problem) await changePassword(problem);
  else {
    const words = t("Password changed. Your other browsers were logged out.");
    await ask(t("Change password"), h("p", words), [{ label: t("Close"), value: () => null }]);
    // What it shows has the old key's ticket.
    location.reload();
  }
}

/** Why the new password isn't taken; nothing where it is. */
async function taken(/** @type {string} */ old, /** @type {string} */ fresh) {
  if (fresh.length < MIN_CHARS) return t("A password needs at least {n} characters.", { n: MIN_CHARS });
  try {
    keepSession(await postTo("password", { old, new: fresh }));
    return "";
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    return problem.kind === "wrong password" ? t("The old password is wrong.") : problem.message;
  }
}
