"""The page of a preview: what it gets while the preview is made, and which files it may read."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen35mm.captioning.preview import Preview
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.texts.trainers import Length
from qwen35mm.http.sessions import PageToken
from qwen35mm.review.preview import Column, Shown
from qwen35mm.review.preview_page import create_preview_app
from tests.captioning.fake_model import Asked, FakeModel
from tests.captioning.runs import job

pytestmark = pytest.mark.usefixtures("media_in_process")


@contextmanager
def page_of(preview: Preview) -> Iterator[TestClient]:
    token = PageToken("abc")
    columns = [Column(title, f"run {title}") for title in ("first", "second")]
    headers = {"authorization": "Bearer abc", "x-qwen35mm": "1"}
    with TestClient(create_preview_app(Shown(preview, columns, None), token=token), "http://127.0.0.1") as client:
        assert client.post("/api/look", headers={"x-qwen35mm": "1"}).status_code == 403
        client.headers.update(headers)
        yield client


def look(client: TestClient, since: int = 0) -> dict[str, Any]:
    return client.post("/api/look", json={"since": since}).json()["preview"]


async def test_the_page_gets_the_rows_that_changed(folder: Path) -> None:
    (folder / "torn.png").write_bytes((folder / "0.png").read_bytes()[:60])
    during: list[dict[str, Any]] = []

    def answer(asked: Asked) -> str:
        if not during:
            during.append(look(client))
        return "" if asked.question == "Second?" else "A picture, of noise."

    style = CaptionStyle(length=Length(3))
    with closing(Preview(job(folder, "First?", "Second?", style=style), 7)) as preview, page_of(preview) as client:
        assert (look(client)["state"], look(client)["rows"]) == ("looking", [])
        preview.look()
        loading = look(client)
        assert (loading["state"], len(loading["rows"])) == ("loading", 7)
        await preview.fill(FakeModel(answer).captioner())
        assert during[0]["state"] == "asking"
        done = look(client, loading["clock"])
        assert (done["state"], done["over"], done["failed"], done["most_tokens"]) == ("done", 7, 1, 3)
        assert look(client, done["clock"])["rows"] == []
        torn, *others = sorted(done["rows"], key=lambda row: row["failed"] is None)
        assert (torn["name"], torn["cells"]) == ("torn.png", [None, None])
        first, second = others[0]["cells"]
        assert (first["text"], first["words"], first["flags"]) == ("A picture, of noise.", 4, ["too long"])
        assert first["tokens"] > 3
        assert second["failed"].startswith("The model answered nothing.")
        columns = [(each["title"], each["command"], each["failed"], each["shortened"]) for each in done["columns"]]
        assert columns == [("first", "run first", 0, 6), ("second", "run second", 6, 0)]


async def test_media_are_shown_also_from_containers_and_nothing_else_is(folder: Path) -> None:
    tar = folder.parent / "0.tar"
    with tarfile.open(tar, "w") as file:
        file.add(folder / "0.png", "0.png")
    with closing(Preview(job(tar, "First?", "Second?"), 1)) as preview, page_of(preview) as client:
        preview.look()
        version = look(client)["version"]
        shown = client.get(f"/media/0?v={version}")
        assert (shown.status_code, shown.content) == (200, (folder / "0.png").read_bytes())
        assert "immutable" in shown.headers["cache-control"]
        assert client.get(f"/small/0?v={version}").headers["content-type"] == "image/jpeg"
        assert client.get("/media/0?v=other").headers["cache-control"] == "no-store"
        assert client.get("/media/1").status_code == 404
        tar.unlink()
        assert client.get("/small/0").status_code == 200
        assert client.post("/api/save", json={}).status_code == 404
