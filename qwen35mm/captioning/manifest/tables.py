"""The manifest's tables.

File names are BLOBs, as the system spells them: they need not be UTF-8. A `place` is a path as returned by
`Manifest.place`.
"""

from __future__ import annotations

from typing import Final

# A manifest of an older or a newer version than `MIGRATIONS` has is refused and left unchanged.
OLDEST: Final = 7

TABLES: Final = (
    """
    CREATE TABLE digests (
        place BLOB PRIMARY KEY,
        num_bytes INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        inode INTEGER NOT NULL,
        digest BLOB NOT NULL
    ) WITHOUT ROWID
    """,
    # `revision` counts how often a better caption replaced the result's.
    """
    CREATE TABLE results (
        sequence INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        caption TEXT NOT NULL,
        first_name BLOB NOT NULL,
        similarity TEXT,
        revision INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE TABLE attempts (key BLOB PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE failures (
        sequence INTEGER PRIMARY KEY,
        name BLOB NOT NULL UNIQUE,
        path BLOB,
        key BLOB,
        kind TEXT NOT NULL,
        message TEXT NOT NULL
    )
    """,
    "CREATE INDEX failures_by_key ON failures (key)",
    # Items whose captions have flags. `flags` is JSON.
    """
    CREATE TABLE problems (
        sequence INTEGER PRIMARY KEY,
        name BLOB NOT NULL UNIQUE,
        path BLOB,
        flags TEXT NOT NULL
    )
    """,
    # Which item has which name in an output. `owner` identifies the item there. `folded` is the place in lower case:
    # names stay distinct on a disk that ignores case. `content` is the SHA-256 of the bytes that the output put there;
    # before that, of the bytes that it replaces.
    """
    CREATE TABLE claims (
        output BLOB NOT NULL,
        owner BLOB NOT NULL,
        place BLOB NOT NULL,
        folded BLOB NOT NULL,
        medium BLOB,
        content BLOB,
        PRIMARY KEY (output, owner),
        UNIQUE (output, folded)
    ) WITHOUT ROWID
    """,
    # `before` and `written` are digests of a sidecar's bytes before and after our last write. `keys_...` name our
    # captions in them. `pending` is 1 until the file was certainly renamed.
    """
    CREATE TABLE sidecars (
        place BLOB PRIMARY KEY,
        before BLOB,
        written BLOB NOT NULL,
        keys_before BLOB NOT NULL,
        keys_written BLOB NOT NULL,
        original TEXT,
        pending INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    # Sidecars that may have a temporary file.
    "CREATE TABLE sidecars_begun (place BLOB PRIMARY KEY) WITHOUT ROWID",
    # A file of lines. `crc` is the CRC-32 of its first `length` bytes; the first `head_length` were there before us.
    # `intent` is the line that comes next or is there already. `num_stale` lines belong to no item any more.
    """
    CREATE TABLE line_files (
        place BLOB PRIMARY KEY,
        length INTEGER NOT NULL,
        crc INTEGER NOT NULL,
        head_length INTEGER NOT NULL,
        num_stale INTEGER NOT NULL,
        intent BLOB NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE shards (
        output BLOB NOT NULL,
        number INTEGER NOT NULL,
        num_records INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        PRIMARY KEY (output, number)
    ) WITHOUT ROWID
    """,
    # `owner` is the name and, where there is a file, its place; see `owner_of`. `path` is as a person wrote it.
    # `revision` is the result's when the entry got its caption. `edited` is a person's text in place of the caption's,
    # and `accepted` the SHA-256 of the text that a person accepted, their own or the model's.
    """
    CREATE TABLE entries (
        position INTEGER PRIMARY KEY,
        output BLOB NOT NULL,
        owner BLOB NOT NULL,
        name BLOB NOT NULL,
        key BLOB NOT NULL REFERENCES results (key),
        content BLOB NOT NULL,
        path BLOB,
        metadata TEXT NOT NULL,
        shard INTEGER,
        row INTEGER,
        revision INTEGER NOT NULL DEFAULT 0,
        edited TEXT,
        accepted BLOB,
        UNIQUE (output, owner)
    )
    """,
    "CREATE INDEX entries_in_order ON entries (output, position)",
    "CREATE INDEX entries_by_name ON entries (output, name)",
    "CREATE INDEX entries_by_key ON entries (output, key)",
    "CREATE INDEX entries_by_shard ON entries (output, shard, row)",
    # A folder's metadata file that was read to its end, and its state then.
    """
    CREATE TABLE metadata_files (
        place BLOB PRIMARY KEY,
        num_bytes INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        inode INTEGER NOT NULL,
        num_rows INTEGER NOT NULL,
        num_bad_rows INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    # The rows of these files. `file_name` is a path below the file's folder, `content` the row's JSON without it.
    """
    CREATE TABLE metadata_rows (
        place BLOB NOT NULL,
        file_name BLOB NOT NULL,
        content TEXT NOT NULL,
        PRIMARY KEY (place, file_name)
    ) WITHOUT ROWID
    """,
)

# What each later version adds to the one before.
MIGRATIONS: Final = (
    TABLES,
    # 8: parts of videos. An entry's `part` is the JSON of `Part`. The `parts` of a split are JSON: start and end of
    # each part of the video with these bytes.
    (
        "ALTER TABLE entries ADD COLUMN part TEXT",
        """
        CREATE TABLE splits (
            content BLOB NOT NULL,
            split TEXT NOT NULL,
            parts TEXT NOT NULL,
            PRIMARY KEY (content, split)
        ) WITHOUT ROWID
        """,
    ),
    # 9: whether our last write of a text or a record was in the mode `overwrite`. What a person makes of it then isn't
    # overwritten again by the same caption.
    (
        "ALTER TABLE sidecars ADD COLUMN overwrote INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE entries ADD COLUMN overwrote INTEGER NOT NULL DEFAULT 0",
    ),
    # 10: filters. `facts` is the JSON of what is known of a medium with these bytes. The `kept` items stand for those
    # that look like them; `place` is NULL without a file.
    (
        "CREATE TABLE facts (content BLOB PRIMARY KEY, facts TEXT NOT NULL) WITHOUT ROWID",
        """
        CREATE TABLE kept (
            sequence INTEGER PRIMARY KEY,
            name BLOB NOT NULL UNIQUE,
            place BLOB,
            similarity TEXT NOT NULL
        )
        """,
    ),
)

# What one manifest copies from another in the same folder, where places mean the same: the query there and the
# statement here. Which records are in which file stays with the manifest of the run that writes it.
TAKEN_OVER: Final = (
    (
        "SELECT key, caption, first_name, similarity, revision FROM results ORDER BY sequence",
        "INSERT INTO results (key, caption, first_name, similarity, revision) VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) "
        "DO UPDATE SET caption = excluded.caption, revision = excluded.revision WHERE excluded.revision > revision",
    ),
    (
        "SELECT name, path, key, kind, message FROM failures ORDER BY sequence",
        "INSERT OR IGNORE INTO failures (name, path, key, kind, message) VALUES (?, ?, ?, ?, ?)",
    ),
    (
        "SELECT name, path, flags FROM problems ORDER BY sequence",
        "INSERT OR IGNORE INTO problems (name, path, flags) VALUES (?, ?, ?)",
    ),
    ("SELECT * FROM digests", "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?)"),
    (
        "SELECT * FROM claims WHERE substr(output, 1, 8) = CAST('sidecar:' AS BLOB)",
        "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?)",
    ),
    ("SELECT * FROM splits", "INSERT OR REPLACE INTO splits VALUES (?, ?, ?)"),
    ("SELECT * FROM facts", "INSERT OR REPLACE INTO facts VALUES (?, ?)"),
    (
        "SELECT name, place, similarity FROM kept ORDER BY sequence",
        "INSERT OR IGNORE INTO kept (name, place, similarity) VALUES (?, ?, ?)",
    ),
    ("SELECT * FROM sidecars", "INSERT OR REPLACE INTO sidecars VALUES (?, ?, ?, ?, ?, ?, ?, ?)"),
)
