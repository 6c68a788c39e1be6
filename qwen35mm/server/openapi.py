"""Describes requests and answers in the OpenAPI document: handlers read bodies themselves, so FastAPI can't."""

from __future__ import annotations

import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from qwen35mm.server.shapes import REPLIES, STREAMING, AnthropicError, OpenAIError

Handler = Callable[[Request], Awaitable[Response]]


_ERRORS = {
    400: "What can't be used, and why.",
    401: "No API key, or another one.",
    403: "A website asks.",
    404: "There is no such model or response.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is packed.",
    421: "This machine is called by another name than its own.",
    429: "As many requests wait as may. Retry-After says when to come again.",
    500: "The engine, or the program, failed.",
    503: "There is no model at this moment. Retry-After says when to come again.",
    504: "The answer took too long.",
}
# The form of each server-sent event.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_ANYWHERE = {401, 403, 421, 500, 503}
_IDS = {400, 404}


@dataclass(frozen=True)
class Route:
    """A path, its handler, and the types of its body and query."""

    path: str
    method: str
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None


def add_routes(app: FastAPI, routes: list[Route], answering: Callable[[Handler], Handler]) -> None:
    """Adds routes to the application and to the document.

    Args:
        answering: wraps a handler so that it answers errors, too.
    """
    added: list[tuple[Route, Any]] = []
    for route in routes:
        summary = (route.handler.__doc__ or "").splitlines()[0]
        app.add_api_route(
            route.path,
            answering(route.handler),
            methods=[route.method],
            response_model=None,
            summary=summary,
        )
        added.append((route, app.router.routes[-1]))
        if route.method == "GET":
            # As load balancers ask.
            app.add_api_route(route.path, answering(route.handler), methods=["HEAD"], include_in_schema=False)
    made = app.openapi
    schemas: dict[str, Any] = {}
    lock = threading.Lock()

    def openapi() -> dict[str, Any]:
        with lock:
            if not schemas:
                # On first use: it takes 0.2 s, and a start doesn't need it.
                found: dict[str, Any] = {}
                for route, of_fastapi in added:
                    of_fastapi.openapi_extra = _described(route, found)
                schemas.update(found)
            document = made()
            document.setdefault("components", {})["schemas"] = schemas
            return document

    app.openapi = openapi


def _described(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    """The document's entry for a route. Adds the schemas it refers to to `schemas`."""
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in re.findall(r"{(\w+)", route.path)
    ]
    if route.query is not None:
        query = _schema(route.query, schemas)
        required = query.get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in query["properties"].items()
        ]
    said: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if route.body is not None:
        schema = _with_nulls(_schema(route.body, schemas))
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return said | {"responses": _responses(route, schemas)}


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Lets optional fields of a body's schema be null, which is the same as leaving them out."""
    required = schema.get("required", ())
    fields = {
        name: field if name in required or _takes_null(field) else {"anyOf": [field, {"type": "null"}]}
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": fields}


def _takes_null(field: dict[str, Any]) -> bool:
    return {"type": "null"} in field.get("anyOf", ())


def _responses(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    """The possible answers, by status."""
    shape = REPLIES.get(route.path, dict[str, Any])
    content: dict[str, Any] = {"application/json": {"schema": _schema_of(shape, "replies", schemas)}}
    if route.path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if route.path in STREAMING:
        content["text/event-stream"] = {"schema": _EVENT}
    failed = AnthropicError if route.path.startswith("/v1/messages") else OpenAIError
    error = {"application/json": {"schema": _schema_of(failed, "errors", schemas)}}
    statuses = [
        status for status in _ERRORS if status in _ANYWHERE or route.body or (_IDS & {status} and "{" in route.path)
    ]
    told = {str(status): {"description": _ERRORS[status], "content": error} for status in statuses}
    return {"200": {"description": "What was asked for.", "content": content}, **told}


def _schema_of(shape: Any, own: str, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(shape).json_schema(ref_template=f"#/components/schemas/{own}.{{model}}")
    schemas |= {f"{own}.{name}": each for name, each in schema.pop("$defs", {}).items()}
    return schema


def _schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    # Protocols use the same names for different types, such as Tool.
    own = f"{model.__module__.rpartition('.')[2]}.{model.__name__}"
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{own}.{{model}}")
    schemas |= {f"{own}.{name}": each for name, each in schema.pop("$defs", {}).items()}
    return schema
