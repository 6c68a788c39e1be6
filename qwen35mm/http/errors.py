"""The error of refused requests; each server formats it in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qwen35mm_preprocess.say import Said, english, said_of


class HttpError(Exception):
    """A refused request.

    Args:
        status: HTTP status code.
        words: message for a person.
        code: error code for programs.
        headers: of the response.
    """

    def __init__(self, status: int, words: Said, code: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.headers = dict(headers)

    @property
    def words(self) -> Said:
        return said_of(self)

    def __str__(self) -> str:
        return english(self.words)
