"""The database's tables. The format's version is the number of migrations; a new format appends one."""

from __future__ import annotations

from typing import Final

_FIRST = (
    """
    CREATE TABLE conversations (
        sequence INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        title TEXT NOT NULL,
        created_s REAL NOT NULL,
        updated_s REAL NOT NULL,
        head TEXT,
        first TEXT,
        settings TEXT NOT NULL
    )
    """,
    "CREATE INDEX conversations_by_owner ON conversations (owner, updated_s)",
    # No cascade on `parent`: SQLite allows 1,000 levels and a conversation may be longer. Subtrees go by ids.
    """
    CREATE TABLE nodes (
        sequence INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent TEXT REFERENCES nodes (id) DEFERRABLE INITIALLY DEFERRED,
        role TEXT NOT NULL,
        created_s REAL NOT NULL,
        text TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        thinking_s REAL,
        status TEXT NOT NULL,
        error TEXT,
        notes TEXT NOT NULL,
        stats TEXT,
        model TEXT
    )
    """,
    "CREATE INDEX nodes_by_conversation ON nodes (conversation)",
    "CREATE INDEX nodes_by_parent ON nodes (parent)",
    """
    CREATE TABLE attachments (
        node TEXT NOT NULL REFERENCES nodes (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        digest TEXT NOT NULL,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        plan TEXT,
        PRIMARY KEY (node, position)
    )
    """,
    "CREATE INDEX attachments_by_digest ON attachments (digest)",
    """
    CREATE TABLE held (
        owner TEXT NOT NULL,
        digest TEXT NOT NULL,
        since_s REAL NOT NULL,
        PRIMARY KEY (owner, digest)
    )
    """,
    "CREATE INDEX held_by_digest ON held (digest)",
    "CREATE TABLE presets (owner TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (owner, name))",
    "CREATE TABLE preferences (owner TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
)

# Messages whose current text is not in the search index (search.py).
_SEARCH = (
    "CREATE TABLE unindexed (sequence INTEGER PRIMARY KEY REFERENCES nodes (sequence) ON DELETE CASCADE)",
    "INSERT INTO unindexed SELECT sequence FROM nodes",
    """
    CREATE TRIGGER nodes_added AFTER INSERT ON nodes
    BEGIN INSERT OR IGNORE INTO unindexed VALUES (new.sequence); END
    """,
    """
    CREATE TRIGGER nodes_changed AFTER UPDATE OF text ON nodes WHEN new.text <> old.text
    BEGIN INSERT OR IGNORE INTO unindexed VALUES (new.sequence); END
    """,
)

_CLIPS = ("ALTER TABLE attachments ADD COLUMN clip TEXT",)

# The oldest message in one question's own prompt.
_OWN_FIRST = ("ALTER TABLE nodes ADD COLUMN first TEXT",)

# Deleted conversations stay while the deletion can be undone; `present` has the others. Older titles count as given by
# a person, since nobody knows.
_SIDEBAR = (
    "ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE conversations ADD COLUMN titled INTEGER NOT NULL DEFAULT 1",
    "ALTER TABLE conversations ADD COLUMN unseen INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE conversations ADD COLUMN deleted_s REAL",
    "ALTER TABLE nodes ADD COLUMN edited INTEGER NOT NULL DEFAULT 0",
    "CREATE VIEW present AS SELECT * FROM conversations WHERE deleted_s IS NULL",
    "CREATE INDEX conversations_deleted ON conversations (deleted_s) WHERE deleted_s IS NOT NULL",
    "DROP INDEX conversations_by_owner",
    "CREATE INDEX conversations_by_owner ON conversations (owner, pinned, updated_s, sequence)",
)

_CROPS = ("ALTER TABLE attachments ADD COLUMN crop_of TEXT",)

# The settings of an answer.
_MADE_WITH = ("ALTER TABLE nodes ADD COLUMN settings TEXT",)

# Calls of tools. `searched` is what the search reads: also what was called, in words.
_CALLS = (
    "ALTER TABLE nodes ADD COLUMN calls TEXT",
    "ALTER TABLE nodes ADD COLUMN call TEXT",
    "ALTER TABLE nodes ADD COLUMN called TEXT",
    "ALTER TABLE nodes ADD COLUMN searched TEXT GENERATED ALWAYS AS (text || COALESCE(char(10) || called, '')) VIRTUAL",
    "DROP TRIGGER nodes_changed",
    """
    CREATE TRIGGER nodes_changed AFTER UPDATE OF text, called ON nodes
    WHEN new.text <> old.text OR new.called IS NOT old.called
    BEGIN INSERT OR IGNORE INTO unindexed VALUES (new.sequence); END
    """,
)

MIGRATIONS: Final = (_FIRST, _SEARCH, _CLIPS, _OWN_FIRST, _SIDEBAR, _CROPS, _MADE_WITH, _CALLS)
