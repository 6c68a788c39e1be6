"""Search in titles and texts: finds all words of a query in any order, and the last one also as a prefix.

An FTS5 index has the words of each text without case and accents. In scripts without spaces each character is a word,
and each part of a query between spaces is a phrase. So one rule serves every language, and finds Chinese words of two
characters, which an index of trigrams can't.

Triggers note changed messages in the table `unindexed`. `index_texts` moves them into the index, and splits them into
words without a lock on the database. Until then, and if SQLite has no FTS5, the search reads the texts by the same
rule. Each connection creates the index if it is missing, so no database needs FTS5.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import unicodedata
from collections.abc import Iterator
from typing import Final

from qwen35mm.chat.store.database import Database
from qwen35mm.chat.store.rows import AFTER, ORDER, Place, place_values

# Thai and Lao, Burmese, Khmer, Japanese, Chinese.
_NO_BLANKS: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_MARKS: Final = "\u0300-\u036f"
_WORD = re.compile(rf"[{_NO_BLANKS}]|(?:[^\W_{_NO_BLANKS}][{_MARKS}]*)+")
_ACCENT = re.compile(rf"[{_MARKS}]")
_MAX_PHRASES = 32
_SLICE_CHARS = 500_000
_SNIPPET_CHARS = 120
_BEFORE_HIT_CHARS = 30
# A snippet comes from this many characters at the beginning of a text.
_LOOKED_AT_CHARS = 200_000

_FIND = """
    WITH hits (sequence) AS ({indexed}
        SELECT n.sequence FROM {unindexed} JOIN present AS c ON c.id = n.conversation
        WHERE c.owner = :owner AND has_words(n.searched, :phrases)
    ), newest (conversation, sequence) AS (
        SELECT conversation, max(sequence) FROM nodes WHERE sequence IN hits GROUP BY conversation
    )
    SELECT c.id, n.id, n.searched FROM present AS c
    LEFT JOIN newest ON newest.conversation = c.id LEFT JOIN nodes AS n ON n.sequence = newest.sequence
    WHERE c.owner = :owner AND (n.id IS NOT NULL OR has_words(c.title, :phrases)) AND {after}
    ORDER BY {order} LIMIT :limit
"""
_INDEXED = (
    "SELECT rowid FROM words WHERE words MATCH :match AND rowid NOT IN (SELECT sequence FROM unindexed) UNION ALL"
)
# CROSS JOIN fixes SQLite's order: otherwise it reads every text before it checks whether that is indexed.
_UNINDEXED = "unindexed CROSS JOIN nodes AS n ON n.sequence = unindexed.sequence"

Snippet = list[tuple[str, bool]]


def prepare(connection: sqlite3.Connection) -> None:
    """Sets up a connection for search; with the index if SQLite has FTS5 and the disk has room."""
    connection.create_function("has_words", 2, _has_words, deterministic=True)
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute(
            "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')"
        )
        connection.execute("SELECT rowid FROM words LIMIT 1")  # fails if another Python made it and this has no FTS5
        connection.execute(
            "CREATE TEMP TRIGGER words_deleted AFTER DELETE ON main.nodes "
            "BEGIN DELETE FROM words WHERE rowid = old.sequence; END"
        )


def phrases_of(query: str) -> list[str]:
    """The phrases of a query: the folded words of each part between spaces, joined by spaces."""
    pieces = (" ".join(_words(piece)) for piece in query.split())
    return [phrase for phrase in pieces if phrase][:_MAX_PHRASES]


def find_phrases(
    connection: sqlite3.Connection, owner: str, phrases: list[str], limit: int, place: Place | None = None
) -> list[tuple[str, str | None, str | None]]:
    """An owner's conversations with the phrases in their title or in one message, in the order of `Place`.

    Returns:
        The id of each, with the id and text of its newest message that matches; None and None if only the title does.
    """
    has_index = _has_index(connection)
    parts = {"indexed": _INDEXED, "unindexed": _UNINDEXED} if has_index else {"indexed": "", "unindexed": "nodes AS n"}
    query = _FIND.format(**parts, after=AFTER, order=ORDER)
    match = " AND ".join(f'"{phrase}"' for phrase in phrases) + " *"
    values = {"owner": owner, "phrases": "\n".join(phrases), "match": match, "limit": limit, **place_values(place)}
    return connection.execute(query, values).fetchall()


def index_texts(database: Database) -> Iterator[None]:
    """Adds new texts to the index, a slice at each step; others may write between the steps.

    Raises:
        StorageError: the database can't be read or written.
    """
    last = 0
    while True:
        rows: list[tuple[int, str]] = []
        num_chars = 0
        with database.reading() as connection:
            if not _has_index(connection):
                return
            found = connection.execute(
                "SELECT sequence, searched FROM unindexed JOIN nodes USING (sequence) WHERE sequence > ? "
                "ORDER BY sequence",
                (last,),
            )
            for row in found:
                rows.append(row)
                num_chars += len(row[1]) + 100
                if num_chars > _SLICE_CHARS:
                    break
        if not rows:
            return
        last = rows[-1][0]
        words = [" ".join(_words(text)) for _, text in rows]
        with database.writing() as connection:
            for (sequence, text), its_words in zip(rows, words, strict=True):
                # Leaves a reply that has grown meanwhile for the next time.
                taken = connection.execute(
                    "DELETE FROM unindexed "
                    "WHERE sequence = ?1 AND ?2 = (SELECT searched FROM nodes WHERE sequence = ?1)",
                    (sequence, text),
                )
                if taken.rowcount:
                    row = (sequence, its_words)
                    connection.execute("INSERT OR REPLACE INTO words (rowid, text) VALUES (?, ?)", row)
        yield


def snippet_of(text: str, phrases: list[str]) -> Snippet:
    """The part of a text with most of the phrases, as segments of text and whether each is a match."""
    text = text[:_LOOKED_AT_CHARS]
    places = [match.span() for match in _WORD.finditer(text)]
    lower = text.lower() if text.isascii() else None
    words = [lower[start:end] if lower else _folded(text[start:end]) for start, end in places]
    wanted = [phrase.split() for phrase in phrases]
    hits: list[tuple[int, int, int]] = []
    for at in range(len(words)):
        for number, phrase in enumerate(wanted):
            there = words[at : at + len(phrase)]
            is_last = number == len(wanted) - 1
            if there == phrase or (is_last and there[:-1] == phrase[:-1] and there[-1].startswith(phrase[-1])):
                hits.append((places[at][0], places[min(at + len(phrase), len(words)) - 1][1], number))
                break

    def num_near(hit: tuple[int, int, int]) -> int:
        end = hit[0] + _SNIPPET_CHARS - _BEFORE_HIT_CHARS
        return len({number for start, last, number in hits if hit[0] <= start and last <= end})

    first = max(hits[:200], key=num_near)[0] if hits else 0
    begin = next((start for start, _ in places if start >= first - _BEFORE_HIT_CHARS), 0)
    end = max((last for _, last in places if last <= begin + _SNIPPET_CHARS), default=begin + _SNIPPET_CHARS)
    pieces: Snippet = [("…", False)] if begin > 0 else []
    at = begin
    for start, last, _ in hits:
        if at <= start < end:
            pieces += [(text[at:start], False), (text[start:last], True)]
            at = last
    pieces += [(text[at:end], False), ("…" if end < len(text.rstrip()) else "", False)]
    return [(re.sub(r"\s+", " ", piece), is_hit) for piece, is_hit in pieces if piece]


def _has_index(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_temp_master WHERE name = 'words_deleted'").fetchone())


def _words(text: str) -> list[str]:
    return _WORD.findall(_folded(text))


def _folded(text: str) -> str:
    """A text without case, accents and differences of Unicode composition."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFD", text.casefold())))


def _has_words(text: str, phrases: str) -> bool:
    held = f" {' '.join(_words(text))} "
    *whole, last = phrases.split("\n")
    return f" {last}" in held and all(f" {phrase} " in held for phrase in whole)
