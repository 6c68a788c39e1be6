"""A button of a message is one line in message.js and a word in every language."""

from __future__ import annotations

import json
from pathlib import Path

from tests.contributing.copies import Copy
from tests.web.test_languages import texts_asked_for

MESSAGE = "assets/web/chat/message.js"
COPY_BUTTON = (
    '      message.text && iconButton("copy", t("Copy"), ({ currentTarget }) => copy(currentTarget, message.text)),\n'
)
BUTTON = '      iconButton("more", t("Shout"), () => this.desk.shout(message.text.toUpperCase())),\n'
# Of a document, what a message's row needs.
TRIAL = """
class Element {
  children = [];
  attributes = {};
  listeners = {};
  classList = { add: () => {}, toggle: () => {} };
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
}
globalThis.document = { createElement: () => new Element(), createElementNS: () => new Element() };
const { QuestionRow } = await import("./assets/web/chat/message.js");
const branch = { at: 1, of: 1, previous: null, next: null };
const question = { id: "one", role: "user", text: "hello", kept: true, branch, attachments: [] };
const row = new QuestionRow(question, { shout: (text) => console.log(text) });
row.show(question);
console.log(...row.tools.children.map(({ attributes }) => attributes["aria-label"]));
row.tools.children.find(({ attributes }) => attributes["aria-label"] === "Shout").listeners.click();
"""


def test_it_is_drawn_and_works_after_one_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path, folders=("assets/web",))
    copy.edit(MESSAGE, COPY_BUTTON, COPY_BUTTON + BUTTON)
    done = copy.run_script(TRIAL)
    assert done.stdout == "Copy Shout Edit Delete\nHELLO\n", done.stderr


def test_its_word_is_asked_of_every_language(tmp_path: Path) -> None:
    copy = Copy(tmp_path, folders=("assets/web",))
    copy.edit(MESSAGE, COPY_BUTTON, COPY_BUTTON + BUTTON)
    asked = texts_asked_for("message.js", (tmp_path / MESSAGE).read_text("utf-8"))
    tables = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "assets/web/languages").glob("*.json")]
    assert [asked - set(table) for table in tables] == [{"Shout"}] * 4
