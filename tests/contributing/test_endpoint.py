"""An endpoint of the server is a handler and a `Route`; one of the page is a method with `@request`."""

from __future__ import annotations

from pathlib import Path

from tests.contributing.copies import Copy

SERVER = "qwen35mm/server/app.py"
SHAPES = "qwen35mm/server/shapes.py"
PAGE = "qwen35mm/web/serving/api.py"
HANDLER = '''
    async def reverse(self, request: Request) -> Response:
        """Reverse a text."""
        self.caller(request)
        body = await read_body(request, TokenizeRequest)
        return JSONResponse({"prompt": body.prompt[::-1]})

'''
METHOD = '''
    @request
    def reverse(self, person: Person, text: str) -> Any:
        """A text from its end."""
        return {"text": text[::-1]}

'''
TRIAL = """
import asyncio, httpx
from types import SimpleNamespace
from qwen35mm.chat.replies.turns import Person
from qwen35mm.http.requests import requests_of
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from qwen35mm.web.serving.api import Api

app = create_app(SimpleNamespace(loaded=SimpleNamespace(name="none")), keys=Keys(["secret"]))

async def ask(json, key="secret"):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.post("/reverse", json=json, headers={"authorization": f"Bearer {key}"})

async def main():
    answer = await ask({"prompt": "abc"})
    assert (answer.status_code, answer.json()) == (200, {"prompt": "cba"}), answer.text
    assert (await ask({"prompt": "abc"}, "other")).status_code == 401
    refused = await ask({"prompt": 7})
    assert refused.status_code == 400 and "prompt" in refused.json()["error"]["message"]
    told = app.openapi()["paths"]["/reverse"]["post"]
    assert told["summary"] == "Reverse a text."
    assert told["requestBody"]["content"]["application/json"]["schema"]["properties"].keys() >= {"model", "prompt"}
    assert told["responses"]["200"]["content"]["application/json"]["schema"]["title"] == "Prompt"
    method, names = requests_of(Api)["reverse"]
    assert names == {"person", "text"} and await method(None, Person("me"), text="abc") == {"text": "cba"}

asyncio.run(main())
print("answered and documented")
"""


def test_it_is_answered_and_documented_after_a_handler_and_a_route(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.edit(SERVER, "    async def health(", f"{HANDLER}    async def health(")
    route = '            Route("/health", "GET", self.health),\n'
    copy.edit(SERVER, route, f'{route}            Route("/reverse", "POST", self.reverse, TokenizeRequest),\n')
    imported = "from qwen35mm.server.tokens import "
    copy.edit(SERVER, imported, f"{imported}TokenizeRequest, ")
    copy.edit(SHAPES, '    "/health": Health,\n', '    "/health": Health,\n    "/reverse": Prompt,\n')
    copy.edit(PAGE, "    @request\n    def rename(", f"{METHOD}    @request\n    def rename(")
    done = copy.run(TRIAL)
    assert done.stdout == "answered and documented\n", done.stderr
