"""The manifest's tables. The format's version is the number of migrations; a new format appends one.

File names are BLOBs, as the system spells them: they need not be UTF-8. A `place` is a path as `Manifest.place` gives
it.
"""

from __future__ import annotations

from typing import Final

_FIRST = (
    """
    CREATE TABLE digests (
        place BLOB PRIMARY KEY,
        num_bytes INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        inode INTEGER NOT NULL,
        digest BLOB NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE results (
        sequence INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        content BLOB NOT NULL,
        caption TEXT NOT NULL,
        first_name BLOB NOT NULL,
        similarity TEXT
    )
    """,
    "CREATE TABLE attempts (key BLOB PRIMARY KEY, name BLOB NOT NULL, count INTEGER NOT NULL) WITHOUT ROWID",
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
    # Which item has which name in an output. `folded` is the place without upper case, so that two names are also two
    # on a disk that doesn't tell cases apart; `owner` is what the item is known by there.
    """
    CREATE TABLE claims (
        output BLOB NOT NULL,
        owner BLOB NOT NULL,
        place BLOB NOT NULL,
        folded BLOB NOT NULL,
        medium BLOB,
        PRIMARY KEY (output, owner),
        UNIQUE (output, folded)
    ) WITHOUT ROWID
    """,
    # `before` and `written` are digests of a sidecar's bytes before and after our last write, and `keys_...` name the
    # captions of ours in them; `pending` until it is certain that the file was renamed.
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
    # A file of lines: its first `length` bytes have the CRC-32 `crc`, of which `head_length` were there before us;
    # `intent` is the line that comes next or is there already; `num_stale` lines are no longer anybody's.
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
        crc INTEGER NOT NULL,
        num_stale INTEGER NOT NULL,
        PRIMARY KEY (output, number)
    ) WITHOUT ROWID
    """,
    # `owner` is the name and, where there is a file, its place; see `owner_of`. `path` is as a person wrote it.
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
        UNIQUE (output, owner)
    )
    """,
    "CREATE INDEX entries_in_order ON entries (output, position)",
    "CREATE INDEX entries_by_name ON entries (output, name)",
    "CREATE INDEX entries_by_key ON entries (output, key)",
    "CREATE INDEX entries_by_shard ON entries (output, shard, row)",
)

_SECOND = (
    # Columns that nothing reads.
    "ALTER TABLE results DROP COLUMN content",
    "ALTER TABLE attempts DROP COLUMN name",
    "ALTER TABLE shards DROP COLUMN crc",
    "ALTER TABLE shards DROP COLUMN num_stale",
    # A folder's metadata file that was read to its end when it was in this state, and the rows of such files:
    # `file_name` is a path below the file's folder, `content` the row's JSON without it.
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
    """
    CREATE TABLE metadata_rows (
        place BLOB NOT NULL,
        file_name BLOB NOT NULL,
        content TEXT NOT NULL,
        PRIMARY KEY (place, file_name)
    ) WITHOUT ROWID
    """,
)

_THIRD = (
    # How often a result's caption was replaced by one that says more, and how often it had been when an entry got it.
    "ALTER TABLE results ADD COLUMN revision INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN revision INTEGER NOT NULL DEFAULT 0",
)

_FOURTH = (
    # Items whose captions have flags; those are JSON.
    """
    CREATE TABLE problems (
        sequence INTEGER PRIMARY KEY,
        name BLOB NOT NULL UNIQUE,
        path BLOB,
        flags TEXT NOT NULL
    )
    """,
)

_FIFTH = (
    # What an output put under a claimed name: the SHA-256 of its bytes, and before that of what it replaces.
    "ALTER TABLE claims ADD COLUMN content BLOB",
)

_SIXTH = (
    # A person's text in place of the caption's; and the SHA-256 of the text that a person accepted, whosever it is.
    "ALTER TABLE entries ADD COLUMN edited TEXT",
    "ALTER TABLE entries ADD COLUMN accepted BLOB",
)

MIGRATIONS: Final = (_FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH)

# What one manifest can learn of another in the same folder, so that places mean the same: what it reads there, and how
# it keeps that. Which records are in which file stays with the manifest of the run that writes it.
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
    ("SELECT * FROM sidecars", "INSERT OR REPLACE INTO sidecars VALUES (?, ?, ?, ?, ?, ?, ?)"),
)
