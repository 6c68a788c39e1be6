"""Detects the encoding of a text file and decodes it.

A byte order mark, valid UTF-8 or a declaration in the first lines decides. Otherwise charset-normalizer judges how each
of the usual encodings decodes the lines that aren't ASCII. It may err on short texts, so the page shows the encoding
and lets a person choose another.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import charset_normalizer

# Names as in browsers and editors, with Python's codecs. If two fit equally well, the first wins.
_LEGACY = {
    "Windows-1252": "cp1252",
    "Windows-1251": "cp1251",
    "KOI8-R": "koi8_r",
    "Shift-JIS": "cp932",
    "GB18030": "gb18030",
    "EUC-JP": "euc_jp",
    "Big5": "big5hkscs",
    "EUC-KR": "cp949",
    "Windows-1250": "cp1250",
    "Windows-1254": "cp1254",
    "Windows-1253": "cp1253",
    "Windows-1255": "cp1255",
    "Windows-1256": "cp1256",
    "IBM866": "cp866",
    "ISO-8859-2": "iso8859_2",
}
_UNICODE = {
    "UTF-8": "utf-8-sig",
    "UTF-16": "utf-16",
    "UTF-16LE": "utf-16-le",
    "UTF-16BE": "utf-16-be",
    "UTF-32": "utf-32",
    "ISO-2022-JP": "iso2022_jp",
}
_CODECS = {**_UNICODE, **_LEGACY}
ENCODINGS = tuple(_CODECS)
# Encodings that are only guessed.
JUDGED = frozenset(_LEGACY)

# Longer marks first: a mark of UTF-32 begins with one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF8, "UTF-8"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# Beginnings of files that aren't text: PNG, JPEG, gzip, xz, 7z, old Office files, ELF. And byte order marks: such files
# are in the marked encoding or in none.
_BINARY = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"\x1f\x8b", b"\xfd7zXZ", b"7z\xbc\xaf", b"\xd0\xcf\x11\xe0", b"\x7fELF"),
    *(mark for mark, _ in _MARKS),
)
# Declarations in HTML, XML, CSS, and in source code for editors.
_DECLARATION = re.compile(rb"(?:charset|encoding|coding)\s*[:=]\s*[\"']?([A-Za-z0-9_-]{2,20})")
_DECLARATION_REACH = 1024
# All control characters except those in texts: tab, line ends, form feed, escape (logs with colours).
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_CONTROL_BYTES = bytes({*range(0x20), 0x7F} - set(b"\t\n\x0c\r\x1b"))
_MAX_CONTROL_SHARE = 0.002
_SAMPLE_BYTES = 16 << 10


def decode(data: bytes, *, final: bool = True) -> tuple[str, str] | None:
    """The text of a file, and the name of its encoding, one of `ENCODINGS`; None if it isn't text.

    Args:
        final: whether `data` is complete; otherwise it may end inside a character.
    """
    for name in _sure(data):
        text = _text(data, name, final)
        if text is not None:
            return text, name
    num_control = len(data) - len(data.translate(None, _CONTROL_BYTES))
    if data.startswith(_BINARY) or num_control > _MAX_CONTROL_SHARE * len(data):
        return None
    if not final:
        data = data[: data.rfind(b"\n") + 1] or data
    for name in [*_declared(data), *_judged(data)]:
        text = _text(data, name, final=True)
        if text is not None:
            return text, name
    return None


def decode_as(data: bytes, name: str) -> str | None:
    """The text of a file in an encoding; None if that isn't in `ENCODINGS`, or doesn't fit the file."""
    return _text(data, name, final=True) if name in _CODECS else None


def _sure(data: bytes) -> Iterator[str]:
    marked = [name for mark, name in _MARKS if data.startswith(mark)]
    if marked:
        yield marked[0]
        return
    if b"\x1b$" in data:
        yield "ISO-2022-JP"
    yield "UTF-8"
    # ASCII in UTF-16 has a zero in every other byte.
    head = data[: len(data) // 2 * 2][:_SAMPLE_BYTES]
    even, odd, some = head[0::2].count(0), head[1::2].count(0), len(head) // 8
    if odd > some > even:
        yield "UTF-16LE"
    if even > some > odd:
        yield "UTF-16BE"


def _declared(data: bytes) -> list[str]:
    found = _DECLARATION.search(data[:_DECLARATION_REACH])
    try:
        codec = codecs.lookup(found[1].decode()).name if found else None
    except LookupError:
        return []
    # Files declared as Latin-1 or Shift-JIS are mostly in Windows' variants.
    codec = {"iso8859-1": "cp1252", "shift_jis": "cp932", "gb2312": "gb18030", "gbk": "gb18030"}.get(codec or "", codec)
    return [name for name, each in _LEGACY.items() if codec == codecs.lookup(each).name]


def _judged(data: bytes) -> list[str]:
    """Encodings by likelihood, judged by the lines that aren't ASCII."""
    lines = (line for line in data.splitlines(keepends=True) if not line.isascii())
    sample = bytearray()
    for line in lines:
        sample += line[:_SAMPLE_BYTES]
        if len(sample) >= _SAMPLE_BYTES:
            break
    scores: list[tuple[float, float, str]] = []
    for name, codec in _LEGACY.items():
        judged = charset_normalizer.from_bytes(
            bytes(sample), cp_isolation=[codec], threshold=1.0, preemptive_behaviour=False, enable_fallback=False
        ).best()
        if judged is not None:
            # Rounded, so that equally good encodings keep their order.
            scores.append((round(judged.chaos, 2), -round(judged.coherence, 1), name))
    return [name for *_, name in sorted(scores, key=lambda score: score[:2])]


def _text(data: bytes, name: str, final: bool) -> str | None:
    try:
        text = codecs.getincrementaldecoder(_CODECS[name])().decode(data, final)
    except UnicodeError:
        return None
    # A few control characters may be some program's slip; many mean a binary file.
    if "\0" in text or len(_CONTROL.findall(text)) > _MAX_CONTROL_SHARE * len(text):
        return None
    return text.removeprefix("\ufeff")
