"""What the kit refuses; each front says it in its own form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qwen35mm_preprocess.say import Said, english, said_of


class HttpError(Exception):
    """A request that isn't answered.

    Args:
        status: HTTP's.
        words: for a person.
        code: what programs tell errors apart by.
        headers: of the answer.
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
