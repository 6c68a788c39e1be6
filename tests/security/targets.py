"""What each front answers, with bodies that it takes."""

from __future__ import annotations

from typing import Any

from qwen35mm.assets import asset_path
from tests.security.fronts import Front
from tests.security.fuzz import MODEL_TOKENS, Route, Target, always, routes_of

PAGE = "/qwen35mm"
_ID = "a" * 32
SETTINGS = {"max_tokens": MODEL_TOKENS, "temperature": 0.5, "system": "So.", "thinking": False, "seed": 1}


def target_of(front: Front) -> Target:
    """A front with something in it, all of whose routes are known."""
    if front.name == "serve":
        return _server(front)
    return _page(front) if front.name == "chat" else _review(front)


def _server(front: Front) -> Target:
    with front.client() as client:
        document = client.get("/openapi.json").json()
        kept = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 1}).json()["id"]
    media = front.folder / "media"
    files = [f"file://{media}/{name}" for name in ("a.png", "../keys", "%2e%2e/keys", "../../../../etc/passwd")]
    picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": files[0]}}
    said = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, picture]}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = {"model": "default", "max_tokens": MODEL_TOKENS}
    by_hand = [
        Route("POST", "/v1/chat/completions", always({**text, "messages": said, "tools": [tool], "stream": True})),
        Route(
            "POST", "/v1/completions", always({**text, "prompt": ["One", "Two"], "n": 2, "echo": True, "logprobs": 2})
        ),
        Route("POST", "/v1/messages", always({**text, "messages": [{"role": "user", "content": "Hello"}]})),
        Route("POST", "/v1/embeddings", always({"input": ["Hello", "You"], "encoding_format": "base64"})),
        Route(
            "POST",
            "/v1/responses",
            always(
                {"model": "default", "input": "Go on", "previous_response_id": kept, "max_output_tokens": MODEL_TOKENS}
            ),
        ),
        Route("GET", "/docs"),
        Route("GET", "/openapi.json"),
    ]
    return Target(front, [*routes_of(document), *by_hand], [kept, *files])


def _page(front: Front) -> Target:
    picture = next(asset_path("samples").glob("*.jpg")).read_bytes()
    with front.client() as client:
        file = client.post(f"{PAGE}/upload?name=a.jpg", content=picture).json()["attachments"][0]
        note = client.post(f"{PAGE}/upload?name=a.txt", content=b"A note.").json()["attachments"][0]
        sent = client.post(f"{PAGE}/api/send", json={"text": "Hello", "settings": SETTINGS}).json()
    chat, reply = sent["chat"]["id"], sent["reply"]
    attached = [{"digest": each["digest"], "kind": each["kind"], "name": each["name"]} for each in (file, note)]
    question = {
        "id": _ID,
        "conversation": chat,
        "parent": reply,
        "text": "What is there?",
        "attachments": attached,
        "settings": SETTINGS,
        "once": {"limits": {"max_image_tokens": 64}, "first": None},
    }
    of_node = {"conversation": chat, "node": reply}
    requests: dict[str, Any] = {
        "start": {},
        "list": {"query": "Hello", "after": {"id": chat, "pinned": False, "updated_s": 1.0}, "limit": 5},
        "open": of_node,
        "answers": of_node,
        "rename": {"conversation": chat, "title": "A title"},
        "pin": {"conversation": chat, "pinned": True},
        "delete": {"conversation": _ID},
        "restore": {"conversation": _ID},
        "branch": of_node,
        "delete_message": {"conversation": chat, "node": _ID},
        "shorten": {"conversation": chat, "first": reply},
        "edit_answer": {**of_node, "text": "Mine."},
        "measure": question,
        "strip": question,
        "shown_strip": {**of_node, "at": 0},
        "send": question,
        "example": {"number": 0},
        "crop": {"digest": file["digest"], "source": "a.jpg", "name": "b.png", "box": [0, 0, 0.5, 0.5], "time_s": None},
        "again": {**of_node, "settings": SETTINGS, "own": {}},
        "continue": {**of_node, "settings": SETTINGS},
        "summarise": {"conversation": chat, "title": "So far"},
        "stop": {"node": reply},
        "settings": {"settings": SETTINGS, "conversation": chat},
        "preferences": {"preferences": {"language": "en", "settings": SETTINGS}},
        "save_preset": {"name": "mine", "settings": SETTINGS},
        "delete_preset": {"name": "none"},
        "memory": {},
        "end_temporary": {"conversation": _ID},
        "models": {},
        "plan": {"source": "./nowhere", "context_length": 512, "weights": "auto", "kv_dtype": "auto"},
        "change_state": {},
        "cancel_change": {},
        "remove_server": {"server": "none"},
        "preview": {"digest": note["digest"], "name": "a.txt"},
        "mermaid": {},
        "download": {},
        "nothing": {},
    }
    files = [Route("POST", f"{PAGE}/{name}", is_file=True) for name in ("upload", "import", "logout", "password")]
    files += [Route("POST", path, is_file=True) for path in ("/gradio_api/upload", "/login", f"{PAGE}/upload")]
    asked = [
        f"digest={file['digest']}&name=a.png",
        f"digest={note['digest']}&name=a.txt&encoding=latin-1",
        "digest=%00",
    ]
    files += [Route("POST", f"{PAGE}/{name}?{each}") for name in ("pages", "recode") for each in asked]
    files += [Route("POST", f"{PAGE}/web_page?address={each}") for each in ("http://127.0.0.1/", "file:///etc/passwd")]
    reading = [f"{PAGE}/{name}/{{}}" for name in ("media", "picture", "frame", "thumbnail", "poster", "web", "samples")]
    reading += [
        f"{PAGE}/export?ids={{}}&form=zip",
        f"{PAGE}/export?form=md&ids={{}}",
        f"{PAGE}/preview",
        f"{PAGE}/export",
    ]
    reading += ["/", "/config", "/gradio_api/info", "/manifest.json", "/pwa_icon/{}", "/gradio_api/call/watch/{}"]
    reading += ["/gradio_api/queue/data?session_hash={}", "/gradio_api/file={}", f"{PAGE}/frame/{{}}?time_s=NaN"]
    call = {"data": ["Hello", [], "", [], {"max_tokens": MODEL_TOKENS}], "fn_index": 1, "session_hash": "s"}
    calls = {
        "call/chat": call,
        "call/watch": {"data": [[reply]]},
        "queue/join": call,
        "run/chat": call,
        "api/chat": call,
    }
    programs = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
    hello = [{"role": "user", "content": "Hello"}]
    return Target(
        front,
        [
            *(Route("POST", f"{PAGE}/api/{name}", always(body)) for name, body in requests.items()),
            *files,
            *(Route("GET", path) for path in reading),
            *(Route("POST", f"/gradio_api/{name}", always(body)) for name, body in calls.items()),
            *(Route("POST", path, always({"messages": hello, "input": "Hello", "max_tokens": 2})) for path in programs),
            Route("GET", "/v1/models/{}"),
            Route("POST", f"{PAGE}/watch", always({"answers": [reply]})),
            Route("POST", f"{PAGE}/session", always({"once": "x" * 32})),
        ],
        [chat, reply, file["digest"], note["digest"], SETTINGS, attached],
    )


def _review(front: Front) -> Target:
    with front.client() as client:
        numbers = client.post("/api/look", json={}).json()["numbers"]
        items = client.post("/api/items", json={"numbers": numbers}).json()["items"]
    digest = items[0]["digest"]
    requests: dict[str, Any] = {
        "look": {},
        "find": {"words": "a", "show": "all", "flag": "", "min_chars": 0, "max_chars": 100},
        "items": {"numbers": numbers},
        "save": {"number": 0, "digest": digest, "text": "A caption.", "editing": "x"},
        "accept": {"number": 0, "digest": digest, "accepted": True},
        "undo": {},
        "nothing": {},
    }
    # To ask the model is slow: it is loaded for the first one.
    wrong = {"number": 99, "prompt": "What is it?", "preset": ""}
    reading = ["/", "/media/{}", "/small/{}", "/small/0?v={}", "/media/0?v={}", "/icon.svg", "/web/{}", "/web/main.js"]
    return Target(
        front,
        [
            *(Route("POST", f"/api/{name}", always(body)) for name, body in requests.items()),
            Route("POST", "/api/ask", always(wrong)),
            Route("POST", "/session", always({"once": "x" * 32})),
            *(Route("GET", path) for path in reading),
        ],
        [digest, *numbers],
    )
