"""A language of the page is a file and one entry in words.js; a text that it lacks is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contributing.copies import Copy
from tests.web import test_languages

WORDS = "assets/web/common/words.js"
TRIAL = """
import { readFileSync } from "node:fs";
globalThis.fetch = async (url) => ({ json: async () => JSON.parse(readFileSync(url, "utf-8")) });
const { LANGUAGES, t, useLanguage } = await import("./assets/web/common/words.js");
console.log(LANGUAGES.it, await useLanguage("it"), t("Close"));
"""


def test_it_is_offered_and_used_after_a_file_and_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy(tmp_path, folders=("assets/web",))
    languages = tmp_path / "assets/web/languages"
    table = json.loads((languages / "es.json").read_text("utf-8")) | {"Close": "Chiudi"}
    (languages / "it.json").write_text(json.dumps(table, ensure_ascii=False), "utf-8")
    monkeypatch.setattr(test_languages, "WEB", tmp_path / "assets/web")
    monkeypatch.setattr(test_languages, "TABLES", sorted(languages.glob("*.json")))
    assert copy.run_script(TRIAL).stdout == "undefined en Close\n"
    with pytest.raises(AssertionError, match="it"):
        test_languages.test_the_page_offers_the_languages_there_are()
    copy.edit(WORDS, 'zh: "中文" }', 'zh: "中文", it: "Italiano" }')
    test_languages.test_the_page_offers_the_languages_there_are()
    done = copy.run_script(TRIAL)
    assert done.stdout == "Italiano it Chiudi\n", done.stderr


def test_its_plurals_are_checked_once_the_test_knows_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it.json"
    path.write_text(json.dumps({"{n} {n|token|tokens}": "{n} {n|token|token|token}"}), "utf-8")
    with pytest.raises(KeyError, match="it"):
        test_languages.test_translations_are_whole(path)
    monkeypatch.setitem(test_languages.NUM_CATEGORIES, "it", 3)
    test_languages.test_translations_are_whole(path)
