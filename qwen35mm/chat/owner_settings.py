"""What is kept of a person beside the conversations: presets by name, and one object of preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35mm.chat.database import Database
from qwen35mm.chat.node_json import dump_object, load_object
from qwen35mm.errors import NotFoundError


class OwnerSettings:
    """The part of a `ConversationStore` that keeps JSON objects, which mean nothing to it."""

    _database: Database

    def presets(self, owner: str) -> dict[str, dict[str, Any]]:
        """The owner's presets by name, in the order of the names."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT name, value FROM presets WHERE owner = ? ORDER BY name", (owner,))
            return {name: load_object(value, "preset") for name, value in rows}

    def save_preset(self, owner: str, name: str, values: Mapping[str, Any]) -> None:
        """Keeps a preset; one of this name is replaced."""
        text = dump_object(values, "preset")
        with self._database.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO presets (owner, name, value) VALUES (?, ?, ?)", (owner, name, text)
            )

    def delete_preset(self, owner: str, name: str) -> None:
        """Raises NotFoundError where there is none of this name."""
        with self._database.writing() as connection:
            if connection.execute("DELETE FROM presets WHERE owner = ? AND name = ?", (owner, name)).rowcount == 0:
                raise NotFoundError("This preset is not there any more.")

    def preferences(self, owner: str) -> dict[str, Any]:
        """The owner's preferences; empty before the first `set_preferences`."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
        return {} if row is None else load_object(row[0], "preferences")

    def set_preferences(self, owner: str, values: Mapping[str, Any]) -> None:
        """Replaces all of the owner's preferences."""
        text = dump_object(values, "preferences")
        with self._database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO preferences (owner, value) VALUES (?, ?)", (owner, text))
