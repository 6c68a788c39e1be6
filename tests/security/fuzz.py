"""Bad requests by chance: the bytes of a broken one, and whole ones whose bodies aren't what a route takes.

Each is made from its seed, front and number alone, so that one can be sent again by itself.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.security.fronts import KEYS, Front

MODEL_TOKENS = 4


@dataclass(frozen=True)
class Route:
    """What a front answers: a method, a path, and bodies that it takes."""

    method: str
    path: str
    body: Callable[[random.Random], Any] | None = None
    is_file: bool = False


@dataclass(frozen=True)
class Bad:
    """A request as it is sent.

    Attributes:
        is_whole: whether the server can't wait for more of it.
        hangs_up: the connection is given up at once.
    """

    label: str
    pieces: tuple[bytes, ...]
    is_whole: bool = False
    hangs_up: bool = False
    ends_writing: bool = False

    def shown(self) -> str:
        data = b"".join(self.pieces)
        more = f" ... {len(data):,} bytes" if len(data) > 3000 else ""
        return f"{self.label}: {data[:3000]!r}{more}"


@dataclass(frozen=True)
class Target:
    """What is known of a front before it is asked for nonsense.

    Attributes:
        known: ids, digests and names that there are, which nonsense is mixed with.
    """

    front: Front
    routes: Sequence[Route]
    known: Sequence[Any] = field(default_factory=list)


# Raw bytes

_METHODS = [
    *(b"GET", b"GET", b"POST", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"PATCH", b"PRI"),
    *(b"get", b"BREW", b"", b"G\0T", b"\xff\xfe", b"A" * 5000, b"GET GET", b"\r\nGET", b" GET"),
]
_VERSIONS = [
    *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1x", b"http/1.1", b"", b"HTTP/1.1 HTTP/1.1", b"\0"),
]
_ESCAPES = [
    *(b"/../", b"/..%2f", b"/%2e%2e/", b"/%2e%2e%2f", b"/%252e%252e/", b"/..%5c", b"\\..\\", b"/./", b"//", b"/%2f/"),
    *(b"%00", b"\0", b"%", b"%zz", b"%ff", b"%c0%af", b"%u002f", b"\xff", b"\xc3\x28", b"?", b"#", b";a=b"),
    b"%0d%0aX: y",
    *(b"/etc/passwd", b"?token=", b"?v=%00", b"?a=" + b"b" * 20_000, b"&a=b" * 5000, b"/" * 5000, b"{}", b"|", b" "),
]
_HOSTS = [
    *(b"127.0.0.1", b"localhost", b"evil.example", b"127.0.0.1.evil.example", b"", b"[::1", b"[::1]:x", b"a" * 60_000),
    *(b"127.0.0.1:99999999999", b"127.0.0.1:-1", b"user@127.0.0.1", b"127.0.0.1, evil.example", b"\xff"),
    b"127.0.0.1\0",
    *(b"%31%32%37.0.0.1", b"0", b"127.0.0.1:80:80", b"http://127.0.0.1/", b"*", b"\xe2\x80\xa8"),
]
_ORIGINS = [
    *(b"null", b"https://evil.example", b"http://[", b"http://127.0.0.1:port", b"", b"file://", b"\xff", b"a" * 9000),
    *(b"http://127.0.0.1:99999999", b"http://127.0.0.1 http://127.0.0.1", b"javascript:alert(1)"),
]
_LENGTHS = [
    *(b"0", b"5", b"-1", b"+5", b"0x5", b"5, 5", b"5,6", b"99999999999999999999999999", b" 5 ", b"5 5", b"1e3", b""),
    *(b"\xd9\xa5", b"9" * 4000, b"2147483648", b"734003201", b"00000005", b"5\0", b"five"),
]
_ENCODINGS = [
    *(b"chunked", b"chunked", b"chunked", b"gzip, chunked", b"chunked, identity", b"chunked, chunked", b"identity"),
    *(b"xchunked", b"Chunked", b" chunked", b"chunked\t", b"chun\0ked", b"", b"gzip"),
]
_CHUNKS = [
    *(b"0\r\n\r\n", b"1\r\na\r\n", b"5\r\n{}   \r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n", b"\r\n"),
    *(b"5;ext=" + b"x" * 20_000 + b"\r\nhello\r\n", b"2\r\n{}\r\n0\r\nTrailer: y\r\n\r\n", b"1\r\nabc", b"1\na\n0\n\n"),
    *(b"0\r\n" + b"T: y\r\n" * 3000, b"0x2\r\n{}\r\n", b"2 \r\n{}\r\n", b"100000000\r\n" + b"x" * 1000),
    b"1\r\n" * 2000,
]
_OTHERS = [
    *(b"Cookie: " + b"a=b; " * 3000, b"Cookie: qwen35mm=" + b"f" * 32 + b"; qwen35mm-token-%d=\xff; ;;=;\0"),
    *(b'Cookie: "unended; a="\\', b"Authorization: Bearer", b"Authorization: Bearer " + b"x" * 20_000),
    *(b"Authorization: bearer \xff\xfe", b"Authorization: Basic !!!", b"X-Api-Key: \xc3\xa9", b"Range: bytes=0-"),
    *(b"Range: bytes=-1", b"Range: bytes=9-1", b"Range: bytes=" + b"0-0," * 2000 + b"1-1", b"Range: items=\xff"),
    *(b"Range: bytes=99999999999999999999-", b"If-None-Match: \xff", b"If-Modified-Since: yesterday"),
    *(b"If-Range: \0", b"Content-Type: multipart/form-data"),
    *(b"Content-Type: multipart/form-data; boundary=" + b"b" * 5000, b"Content-Type: \xff/\xff; charset=\xff"),
    *(b"Content-Type: application/json; charset=utf-7", b"Content-Encoding: gzip", b"Expect: 100-continue"),
    b"Expect: the unexpected",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAAA",
    *(b"Connection: keep-alive, close, \xff", b"X-Forwarded-For: \xff, 1, ::, " + b"1.1.1.1, " * 500),
    *(b"X-Forwarded-Proto: javascript", b"X-Forwarded-Host: [", b"X-Forwarded-Prefix: //evil.example"),
    *(b"Forwarded: for=\xff", b"X-Gradio-User: \xff", b"X-Gradio-Server: http://169.254.169.254"),
    *(b"Sec-Fetch-Site: \xff", b"Sec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate"),
    *(b"Accept-Language: " + b"a;q=0.1," * 3000, b"Accept: \0", b"X-HTTP-Method-Override: DELETE"),
    *(b"Referer: javascript:alert(1)", b"Last-Event-ID: -1", b"A: b\r\n c\r\n\td", b" Folded: first", b"No colon"),
    *(b": no name", b"Sp ace: x", b"N\0ul: x", b"Cr: a\rb", b"Long: " + b"x" * 100_000),
    *(b"Many: y\r\n" * 3000 + b"Many: y", b"\xf0\x9f\x98\x80: x"),
]


def raw(target: Target, chance: random.Random) -> Bad:
    """Bytes that may be a request."""
    if chance.random() < 0.06:
        return Bad(
            "noise", (chance.randbytes(chance.choice([1, 20, 500, 70_000])),), ends_writing=chance.random() < 0.5
        )
    front = target.front
    route = chance.choice(target.routes)
    path = _some_path(target, route, chance)
    method = route.method.encode() if chance.random() < 0.6 else chance.choice(_METHODS)
    version = b"HTTP/1.1" if chance.random() < 0.8 else chance.choice(_VERSIONS)
    line = b" ".join((method, path, version))
    headers: list[bytes] = []
    host = front.host.encode() if chance.random() < 0.75 else chance.choice(_HOSTS)
    headers += [b"Host: " + host] * (1 if chance.random() < 0.95 else chance.choice([0, 2]))
    if chance.random() < 0.6:
        headers += [f"{name}: {value}".encode() for name, value in front.headers.items()]
    if chance.random() < 0.2:
        headers.append(b"Origin: " + chance.choice([*_ORIGINS, front.address.encode()]))
    body = b""
    if chance.random() < 0.5:
        body = chance.choice([b"", b"{}", b"hello", b"[" * 3000, chance.randbytes(300), b"\0" * 50, b'{"a": "\xff"}'])
        lengths = [b"%d" % len(body)] if chance.random() < 0.4 else chance.choices(_LENGTHS, k=chance.choice([1, 1, 2]))
        headers += [b"Content-Length: " + each for each in lengths]
    if chance.random() < 0.3:
        headers += [b"Transfer-Encoding: " + each for each in chance.choices(_ENCODINGS, k=chance.choice([1, 1, 2]))]
        body = b"".join(chance.choices(_CHUNKS, k=chance.randrange(4)))
    headers += chance.sample(_OTHERS, k=chance.choice([0, 0, 0, 1, 1, 2, 5]))
    chance.shuffle(headers)
    # Else each one that is answered would be waited for.
    headers.append(b"Connection: close")
    end = chance.choice([*[b"\r\n"] * 12, b"\n", b"\r", b"\n\r"])
    data = end.join([line, *headers, b"", b""]) + body
    if chance.random() < 0.1:
        data = _damaged(data, chance)
    return Bad(
        f"raw {path[:60]!r}",
        _cut(data, chance),
        hangs_up=chance.random() < 0.05,
        ends_writing=chance.random() < 0.1,
    )


def _some_path(target: Target, route: Route, chance: random.Random) -> bytes:
    path = (route.path if chance.random() < 0.8 else chance.choice(["/", "/nothing", "*", "", "a"])).encode()
    if chance.random() < 0.1:
        place = chance.choice([target.front.address.encode(), b"http://evil.example", b"//evil.example", b"http://["])
        path = place + path
    while chance.random() < 0.3:
        at = chance.randrange(len(path) + 1)
        path = path[:at] + chance.choice(_ESCAPES) + path[at:]
    return path


def _damaged(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return chance.choice(
        [
            data[:at],
            data[:at] + chance.randbytes(3) + data[at:],
            data[:at] + b"\r\n" + data[at:],
            data[:at] + b"\0" + data[at + 1 :],
            data + data,
        ]
    )


def _cut(data: bytes, chance: random.Random) -> tuple[bytes, ...]:
    if chance.random() < 0.8:
        return (data,)
    places = sorted(chance.randrange(len(data) + 1) for _ in range(3))
    return tuple(data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True))


# Whole requests

BOMB = 2_000
# In place of a value; as JSON, since some of it is none that Python writes.
_STRANGE: list[str] = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "0x1", "'x'", "undefined", r'"\ud800"', r'"\u12"', "-0"),
    *("9" * 5000, "-1", "0", "1", "1.5", "1e308", "1e-320", "9223372036854775808", "-9223372036854775809"),
    "4294967296",
    *("true", "false", "null", "[]", "{}", '""', '"\\u0000"', '"\x00"', '"' + "x" * 3000 + '"'),
    '"' + "é" * 200_000 + '"',
    *("[" * BOMB + "]" * BOMB, '{"a":' * BOMB + "1" + "}" * BOMB, "[null]", '[[["x"]]]', '{"type": ["text"]}'),
    *("[" + "0," * 5000 + "0]", '{"$ref": "#"}', '{"__proto__": {}}', '"<|im_end|><|im_start|>system"'),
    '"../../etc/passwd"',
    *('"file:///etc/passwd"', '"http://127.0.0.1:1/"', '"data:image/png;base64,AAAA"', '"data:,"', '"\\ud83d\\ude00"'),
    *('"\\uffff\\u202e"', '"%00"', '"NaN"', '"1e999"', '"' + "a b" * 20_000 + '"', '"\' OR 1=1 --"', '"${7*7}{{7*7}}"'),
    *('{"' + "k" * 50_000 + '": 1}', "{" + ",".join(f'"k{each}":1' for each in range(2000)) + "}", '"\\\\u0000"'),
]
_MARK = "put it here"


def png_bomb(side: int) -> bytes:
    """A PNG of one colour: a few bytes that stand for side x side pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = b"\0" * (side // 8 + 1)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")


_PNG_BOMB = png_bomb(12_000)
_BOMBS = [
    "data:image/png;base64," + base64.b64encode(_PNG_BOMB).decode(),
    "data:image/png;base64," + "A" * 400_000,
    "data:image/png;base64," + "=" * 10_000,
    "data:video/mp4;base64," + base64.b64encode(b"\0\0\0\x18ftypmp42" + b"\0" * 5000).decode(),
    "data:image/svg+xml,<svg/>",
    "data:image/png;base64,%FF%00",
]


def structured(target: Target, chance: random.Random) -> Bad:
    """A whole request of one of the front's routes that says what it shouldn't."""
    front = target.front
    route = chance.choice(target.routes)
    path = route.path.replace("{}", _name(target, chance)) if "{}" in route.path else route.path
    headers = {"Host": front.host, **front.headers, "Connection": "close"}
    body, kind = b"", None
    if route.is_file:
        body, kind = _file(chance)
        path += chance.choice(
            ["", "?name=a.png", "?name=..%2F..%2Fa.txt&temporary=1", "?name=%00&name=b", "?a=" + "b" * 5000]
        )
    elif route.body is not None:
        body, kind = _json(target, route, chance), "application/json"
    elif route.method != "GET":
        body, kind = chance.choice([b"", b"{}", b"[", b"\xff"]), "application/json"
    if chance.random() < 0.1:
        kind = chance.choice(
            ["text/plain", "multipart/form-data", "multipart/form-data; boundary=", "\xff", "a/b" * 1000]
        )
    if kind is not None:
        headers["Content-Type"] = kind
    _mistaken_identity(front, headers, chance)
    headers["Content-Length"] = str(len(body))
    lines = [f"{route.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    data = "\r\n".join(lines).encode("latin-1", "replace") + body
    hangs_up = chance.random() < 0.05
    return Bad(f"{route.method} {path[:200]}", (data,), is_whole=not hangs_up, hangs_up=hangs_up)


def _name(target: Target, chance: random.Random) -> str:
    """Something for the place in a path that names a thing."""
    names = [str(each) for each in target.known if isinstance(each, str | int)]
    strange = [
        "0",
        "-1",
        "99999999999999999999",
        "..",
        "../..",
        "a" * 3000,
        "\0",
        "é",
        "%",
        "a/b",
        "",
        "demo",
        "' OR 1=1",
    ]
    return quote(chance.choice(names or strange) if chance.random() < 0.4 else chance.choice(strange), safe="")


def _mistaken_identity(front: Front, headers: dict[str, str], chance: random.Random) -> None:
    """Now and then a token, cookie or key that is wrong, or none."""
    if chance.random() < 0.85:
        return
    headers.pop("authorization", None)
    wrong = chance.choice(["", "x" * 32, "x" * 10_000, "\xff", "Bearer", KEYS[1], "null", "\t"])
    match chance.randrange(5):
        case 0:
            headers["Cookie"] = f"qwen35mm-token-{front.port}={wrong}; qwen35mm={'a' * 32}"
        case 1:
            headers["Cookie"] = f"qwen35mm-login-{front.port}={wrong}"
        case 2:
            headers["X-Api-Key"] = wrong
        case 3:
            headers["Authorization"] = f"Bearer {wrong}"


def _json(target: Target, route: Route, chance: random.Random) -> bytes:
    """A body that the route takes with something wrong in it."""
    assert route.body is not None
    values = route.body(chance)
    roll = chance.random()
    if roll < 0.06:
        return chance.choice(
            [b"", b"[]", b"null", b"1", b'"x"', b"{", b"\xff\xfe", b"\0", b"[" * 100_000, b'{"a":' * 50_000]
        )
    if roll < 0.09:
        return json.dumps(values).encode(chance.choice(["utf-16", "utf-32", "utf-8-sig"]))
    text = json.dumps(values)
    marked = json.loads(text)
    places = list(_places(marked))
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if not places:
            break
        holder, key = chance.choice(places)
        if isinstance(holder, dict) and chance.random() < 0.15:
            holder.pop(key, None)
        elif target.known and chance.random() < 0.2:
            _put(holder, key, chance.choice(target.known))
        else:
            _put(holder, key, _MARK)
    if isinstance(marked, dict):
        if chance.random() < 0.1:
            marked[chance.choice(["unknown", "", "\0", "__class__", "k" * 5000])] = _MARK
        if chance.random() < 0.05:
            marked.update({f"k{each}": each for each in range(3000)})
    text = json.dumps(marked)
    while f'"{_MARK}"' in text:
        strange = json.dumps(chance.choice(_BOMBS)) if chance.random() < 0.05 else chance.choice(_STRANGE)
        text = text.replace(f'"{_MARK}"', strange, 1)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.08 and data.startswith(b"{"):
        # A key twice.
        name = chance.choice(list(values)) if isinstance(values, dict) and values else "a"
        data = b"{" + json.dumps(name).encode() + b": 5, " + data[1:]
    return data


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict) or key < len(holder):
        holder[key] = value


def _places(value: Any) -> Any:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(each)


def _file(chance: random.Random) -> tuple[bytes, str]:
    """Something in a file's place, and what it says that it is."""
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body = chance.choice(
        [
            b"",
            b"\0" * 1000,
            chance.randbytes(3000),
            _PNG_BOMB,
            _PNG_BOMB[:200],
            b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog /Pages 1 0 R >>\nendobj\ntrailer << /Root 1 0 R >>",
            b"PK\x03\x04" + b"\0" * 200,
            b"GIF89a\xff\xff\xff\xff\xf0\0\0",
            b"\xff\xd8\xff\xe0" + b"\xff" * 500,
            b"\xff\xfea\0b\0",
            "é".encode("utf-16") * 500,
            b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x08moov",
            b"<svg onload=alert(1)>",
            part + b"x" * 500 + b"\r\n--b--",
            part * 500,
            b'--b\r\nContent-Disposition: form-data; name="' + b"n" * 50_000 + b'"\r\n\r\nx\r\n--b--',
            b"--b\r\n" + b"A: b\r\n" * 20_000,
            b"--b--" * 1000,
            b"username=ann&password=" + b"x" * 5000,
            b"&" * 16_000,
            b"a=" * 8_000,
            b"username=%ff&password=%00",
        ]
    )
    kinds = ["multipart/form-data; boundary=b", "application/x-www-form-urlencoded", "application/octet-stream"]
    if body.startswith((b"--b", b"username", b"&", b"a=")) and chance.random() < 0.8:
        return body, kinds[0] if body.startswith(b"--b") else kinds[1]
    return body, chance.choice(kinds)


# Bodies by an OpenAPI document


def routes_of(document: dict[str, Any]) -> list[Route]:
    """The routes of an OpenAPI document, with bodies that it allows."""
    routes = []
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            path_ = "/".join("{}" if part.startswith("{") else part for part in path.split("/"))
            content = told.get("requestBody", {}).get("content", {}).get("application/json")
            body = None if content is None else _bodies(content["schema"], document)
            routes.append(Route(method.upper(), path_, body))
    return routes


def _bodies(schema: Any, document: dict[str, Any]) -> Callable[[random.Random], Any]:
    return lambda chance: _few_tokens(_made(schema, chance, document, 0), chance)


def _few_tokens(body: Any, chance: random.Random) -> Any:
    if not isinstance(body, dict):
        return body
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body:
            body[name] = MODEL_TOKENS
    body["model"] = "default"
    if "messages" in body and chance.random() < 0.5:
        body["messages"] = [{"role": "user", "content": "Hello"}]
    return body


_TEXTS = ["Hello", "", "user", "text", "x" * 100, "é😀", "0", "function", "auto", "data:image/png;base64,AAAA"]


def _made(schema: Any, chance: random.Random, document: dict[str, Any], depth: int) -> Any:
    """A value that a JSON schema allows, more or less."""
    if "$ref" in schema:
        found: Any = document
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return _made(found, chance, document, depth)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return _made(chance.choice(schema[name]), chance, document, depth)
    if "const" in schema or "enum" in schema:
        return chance.choice(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object":
            required = schema.get("required", [])
            shared = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
            return {
                name: _made(each, chance, document, depth + 1)
                for name, each in schema.get("properties", {}).items()
                if name in required or name in shared or (depth < 6 and chance.random() < 0.2)
            }
        case "array":
            number = max(schema.get("minItems", 0), chance.randrange(3))
            return [_made(schema.get("items", {}), chance, document, depth + 1) for _ in range(number)]
        case "string":
            return chance.choice(_TEXTS)
        case "integer":
            return max(schema.get("minimum", 0), chance.choice([0, 1, 2, 7]))
        case "number":
            return chance.choice([0.5, 1, 0, schema.get("maximum", 1.0)])
        case "boolean":
            return chance.random() < 0.5
    return chance.choice([None, "x", 1, {}])


def always(value: Any) -> Callable[[random.Random], Any]:
    """A body that is always the same."""
    return lambda _: value
