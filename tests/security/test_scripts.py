"""Nothing that is written to run becomes anything that runs: in answers, names, titles and what files hold."""

from __future__ import annotations

import json

from qwen35mm.web.rendering.markdown import render_blocks
from tests.security.conftest import OpenFront
from tests.security.fronts import Name
from tests.security.scripts import PAYLOADS
from tests.web.rendering.test_markdown import checked

SETTINGS = {"max_tokens": 1, "thinking": False}


_FRAMES = ("a {} b", "- {}", "> {}\n> more", "| {} |\n|---|\n| x |", "**{}**", "$x$ {}")


def test_markdown_makes_no_active_html_of_it() -> None:
    """Tags, attributes and addresses are those of a list; pieces of it, as they come in a stream, too."""
    for number, payload in enumerate(PAYLOADS):
        checked(payload)
        text = _FRAMES[number % len(_FRAMES)].replace("{}", payload)
        checked(text)
        checked(text[: 2 * len(text) // 3])


def test_all_of_it_in_one_text_is_inert() -> None:
    checked("\n\n".join(PAYLOADS))
    checked(" ".join(PAYLOADS))
    assert "<script" not in "".join(render_blocks("\n".join(PAYLOADS))).lower()


def test_what_carries_names_and_titles_is_never_a_page(open_front: OpenFront) -> None:
    """Titles, names, presets and files come as JSON, or as what no browser runs, whatever is in them."""
    with open_front("chat").client() as client:

        def is_inert(method: str, path: str, **how: object) -> dict[str, object]:
            answer = client.request(method, path, **how)  # pyright: ignore[reportArgumentType]
            kind = answer.headers["content-type"].partition(";")[0]
            assert answer.status_code < 500
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert kind == "application/json" or "sandbox" in answer.headers["content-security-policy"], (path, kind)
            assert kind not in ("text/html", "image/svg+xml", "application/xhtml+xml", "text/xml") or (
                "default-src 'none'" in answer.headers["content-security-policy"]
            )
            return answer.json() if kind == "application/json" else {}

        sent = client.post("/qwen35mm/api/send", json={"text": "Hello", "settings": SETTINGS}).json()
        chat = sent["chat"]["id"]
        for payload in PAYLOADS[::20]:
            is_inert("POST", "/qwen35mm/api/rename", json={"conversation": chat, "title": payload})
            is_inert("POST", "/qwen35mm/api/save_preset", json={"name": payload[:60], "settings": {"system": payload}})
            is_inert("POST", "/qwen35mm/api/open", json={"conversation": payload})
            is_inert("POST", f"/qwen35mm/api/{payload[:3].encode().hex()}", json={})
            found = is_inert(
                "POST", "/qwen35mm/upload", params={"name": payload}, content=f"<html>{payload}".encode()
            ).get("attachments", [])
            assert isinstance(found, list)
            for file in found:
                is_inert("GET", f"/qwen35mm/media/{file['digest']}")
                is_inert("POST", "/qwen35mm/api/preview", json={"digest": file["digest"], "name": payload})
        for form in ("md", "zip"):
            code = client.post("/qwen35mm/api/download", json={}).json()["code"]
            answer = client.get(f"/qwen35mm/export?ids={chat}&form={form}&code={code}")
            assert answer.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        is_inert("POST", "/qwen35mm/api/list", json={})


def test_refusals_repeat_no_markup_as_a_page(open_front: OpenFront) -> None:
    paths: list[tuple[Name, str]] = [("serve", "/v1/models/"), ("review", "/media/"), ("chat", "/qwen35mm/media/")]
    for name, path in [*paths, ("chat", "/nothing/")]:
        front = open_front(name)
        with front.client() as client:
            for payload in PAYLOADS[:40:5]:
                answer = client.get(path + json.dumps(payload).strip('"').encode().hex() + "<script>alert(1)</script>")
                assert answer.status_code in (400, 404)
                assert "text/html" not in answer.headers["content-type"]
