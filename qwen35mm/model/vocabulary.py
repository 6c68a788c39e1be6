"""llguidance's table of a vocabulary, for constrained decoding.

Building it holds Python's global lock, for a second and a half with 248,000 tokens. Hence it is built while the weights
load, when nobody waits for a token.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from qwen35mm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)


class GrammarVocabulary:
    """Every id with its bytes, as llguidance needs them. Any thread may use it.

    Answers contain no control tokens; the ids that end a reply end the grammar.

    Args:
        tokenizer: the checkpoint's.
        eos_ids: ids that end a reply.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = sorted(eos_ids)
        self._built: Future[LLTokenizer] | None = None
        self._process: int | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Builds the table in a thread of its own; without llguidance, does nothing."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            return
        self._begun()

    @property
    def table(self) -> LLTokenizer:
        """The table; waits until it is built.

        Raises:
            ImportError: llguidance isn't installed.
        """
        return self._begun().result()

    def _begun(self) -> Future[LLTokenizer]:
        with self._lock:
            built = self._built
            # A fork has no thread that would finish it.
            if built is None or not (built.done() or self._process == os.getpid()):
                built, self._process = Future(), os.getpid()
                self._built = built
                threading.Thread(target=self._build, args=(built,), name="qwen35mm-vocabulary").start()
        return built

    def _build(self, built: Future[LLTokenizer]) -> None:
        try:
            import llguidance

            wrapped = llguidance.TokenizerWrapper(_Tokens(self.tokenizer, self.eos_ids[0]))
            # In two steps, between which other threads run.
            table = llguidance.LLTokenizer(wrapped, eos_token=self.eos_ids, slices=[])
            table = table.with_slices(llguidance.LLTokenizer.json_slices())
            # The table has its own copy.
            wrapped.tokens = ()
        except BaseException as error:
            logger.warning("the vocabulary for constrained decoding can't be built", exc_info=error)
            built.set_exception(error)
        else:
            built.set_result(table)


class _Tokens:
    """The tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids.values())

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text)
