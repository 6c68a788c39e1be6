"""Constrained decoding with llguidance (the extra `schema`): which tokens may come next in an answer that follows a
JSON schema or a client's grammar, or makes calls (`call_grammar`).

An answer by a schema is JSON on one line as `json.dumps` writes it: the only white space follows `,` and `:`, so that
no model writes white space without end. Properties come in the schema's order. Characters are written as they are.
`\\u` isn't allowed: half a surrogate is no text, and an escaped property name would evade the schema. A keyword that
can't be enforced is refused, not ignored.

The library jsonschema, which checks captions again, is stricter in three places: `multipleOf` with decimals (it divides
floats), `\\W` (Python's matches no letter of any script), and `minProperties` if a free key was written twice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qwen35mm.contract import SamplingParams
from qwen35mm.engine import grammar_check
from qwen35mm.engine.grammar_check import Kind
from qwen35mm.errors import EngineError, MissingExtraError, RequestError
from qwen35mm.model.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

MAX_COMPILED = 16
# The beginnings of a schema's and a grammar's refusal.
REFUSAL = "Replies can't be constrained to this JSON schema"
GRAMMAR_REFUSAL = "Replies can't be constrained to this grammar"

_SCRIPT = Path(grammar_check.__file__)
# Windows can't limit a child's processor time or memory.
_IS_CLOCK_THE_LIMIT = sys.platform == "win32"
# Elsewhere it ends a child that hangs without computing. A busy machine may take long to start a process.
_TIMEOUT_S = 10.0 if _IS_CLOCK_THE_LIMIT else 120.0
# Exit statuses after too much time, memory or stack (SIGBUS on macOS); on Windows STATUS_ACCESS_VIOLATION,
# STATUS_STACK_OVERFLOW and STATUS_STACK_BUFFER_OVERRUN (an abort).
_ENDS_BY_TOO_MUCH = {
    *(-getattr(signal, name, 0) for name in ("SIGXCPU", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS")),
    *(0xC0000005, 0xC00000FD, 0xC0000409),
}
_TOO_MUCH = (
    f"checking it takes more than {grammar_check.CPU_S} s, {grammar_check.MEMORY_BYTES >> 20} MiB of memory, or too "
    "deep a recursion. Take fewer and simpler patterns, above all side by side in allOf or patternProperties, smaller "
    "numbers in multipleOf, and shorter chains of $ref"
)
# A compiling thread gets more than the child had.
_STACK_BYTES = 2 * grammar_check.STACK_BYTES
_stack_lock = threading.Lock()
_MAX_VERDICTS = 256


def check_json_schema(text: str) -> None:
    """Checks that a JSON schema can constrain answers; needs no model.

    The first check of a schema starts a child process and can take seconds: see `GRAMMARS` in `pools`.

    Raises:
        RequestError: the schema has a keyword that can't be enforced or a reference to another file, matches nothing,
            or takes too much time or memory.
        MissingExtraError: llguidance isn't installed.
        EngineError: the check failed.
    """
    refused = first_refused(("strict", text))
    if refused is not None:
        raise refusal(refused[1])


def check_grammar(lark: str) -> None:
    """Checks that a client's grammar can constrain answers, as `check_json_schema` does for a schema.

    Raises:
        RequestError: it can't be read, names tokens, matches nothing, or takes too much time or memory.
        MissingExtraError: llguidance isn't installed.
        EngineError: the check failed.
    """
    refused = first_refused(("grammar", lark))
    if refused is not None:
        raise refusal_of_grammar(refused[1])


def check_constraint(params: SamplingParams) -> None:
    """Checks an answer's schema or grammar; raises what `check_json_schema` and `check_grammar` do."""
    if params.json_schema is not None:
        check_json_schema(params.json_schema)
    elif params.grammar is not None:
        check_grammar(params.grammar)


def refusal_of_grammar(reason: str) -> RequestError:
    """The error for a client's grammar that can't constrain replies."""
    return RequestError(f"{GRAMMAR_REFUSAL}: {reason}. Change it, or leave it out.")


def refusal(reason: str) -> RequestError:
    """The error for a JSON schema that can't constrain replies."""
    return RequestError(f"{REFUSAL}: {reason}. Change the schema, or leave that part out.")


def refusal_of_tools(reason: str) -> RequestError:
    """The error for tools that can't constrain replies."""
    return RequestError(f"Replies can't be constrained to these tools: {reason}. Use fewer or simpler ones.")


def embedded(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A JSON schema as part of a Lark grammar, with the same options as an answer's schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': grammar_check.options(lenient=lenient)})}"


_Verdict = tuple[int, str] | None
_verdicts: dict[bytes, _Verdict] = {}
# Running checks: callers with the same grammars wait for the same child.
_checks: dict[bytes, Future[_Verdict]] = {}
_verdicts_lock = threading.Lock()
_UNKNOWN = object()


def first_refused(*grammars: tuple[Kind, str]) -> tuple[int, str] | None:
    """The index of the first refused grammar, and the reason; None if none is refused.

    Verdicts are remembered, so that an expensive grammar is checked once.

    Args:
        grammars: the last one is compiled and tried; the others are its parts, so that an error can name one.

    Raises:
        MissingExtraError: llguidance isn't installed.
        EngineError: the check failed.
    """
    packages = Path(_llguidance().__file__).parent.parent
    digest = hashlib.sha256(json.dumps(grammars).encode()).digest()
    with _verdicts_lock:
        known: Any = _verdicts.get(digest, _UNKNOWN)
        if known is not _UNKNOWN:
            return known
        check, is_new = _checks.get(digest), digest not in _checks
        if check is None:
            check = _checks[digest] = Future()
    if is_new:
        limits = {"cpu_s": grammar_check.CPU_S, "memory_bytes": grammar_check.MEMORY_BYTES}
        work = {"packages": str(packages), "grammars": grammars, **limits}
        _check_into(check, digest, json.dumps(work), len(grammars) - 1)
    return check.result()


def _check_into(check: Future[_Verdict], digest: bytes, work: str, last: int) -> None:
    try:
        verdict = _child_says(work, last)
    except BaseException as error:
        with _verdicts_lock:
            del _checks[digest]
        check.set_exception(error if isinstance(error, EngineError) else _no_verdict())
        if not isinstance(error, EngineError):
            raise
        return
    with _verdicts_lock:
        del _checks[digest]
        for oldest in list(_verdicts)[: max(0, len(_verdicts) + 1 - _MAX_VERDICTS)]:
            del _verdicts[oldest]
        _verdicts[digest] = verdict
    check.set_result(verdict)


def _child_says(work: str, last: int) -> _Verdict:
    try:
        # Isolated: neither this folder nor the environment affects the child's imports.
        ended = subprocess.run(
            [sys.executable, "-I", str(_SCRIPT)],
            input=work.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
            # Ctrl-C must reach only the parent.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if _IS_CLOCK_THE_LIMIT and isinstance(error, subprocess.TimeoutExpired):
            return last, _TOO_MUCH
        logger.warning("a grammar could not be checked: %s", error)
        raise _no_verdict() from error
    if ended.returncode == 0:
        verdict = json.loads(ended.stdout)
        return (verdict["at"], _first_line(verdict["error"])) if verdict else None
    logger.warning("the check of a grammar ended with status %d", ended.returncode)
    if ended.returncode not in _ENDS_BY_TOO_MUCH:
        raise _no_verdict()
    return last, _TOO_MUCH


def _no_verdict() -> EngineError:
    return EngineError("The schema couldn't be checked; the log has the details. Try again.")


class Grammars:
    """Compiles grammars for one vocabulary and keeps the most recent. Any thread may use it.

    Args:
        vocabulary: the checkpoint's.
        vocab_size: number of logits.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._not_the_end = torch.ones(vocab_size, dtype=torch.bool)
        self._not_the_end[vocabulary.eos_ids] = False
        self._compiled = functools.lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def matcher(self, json_schema: str, so_far: str = "") -> Matcher:
        """A matcher for one reply. The first for a schema can take seconds.

        Args:
            json_schema: JSON text.
            so_far: the answer's beginning if a reply is continued.

        Raises:
            RequestError: what `check_json_schema` raises, or `so_far` doesn't fit the schema.
            MissingExtraError: llguidance isn't installed.
            EngineError: the check failed.
        """
        misfit = "the JSON schema. Ask again without continuing it, or continue it without a schema."
        return self._matcher("strict", json_schema, so_far, misfit)

    def matcher_of_grammar(self, lark: str, so_far: str = "") -> Matcher:
        """A matcher for one reply that follows a client's grammar. The first for a grammar can take seconds.

        Args:
            lark: a grammar in llguidance's dialect of Lark.
            so_far: the answer's beginning if a reply is continued.

        Raises:
            RequestError: what `check_grammar` raises, or `so_far` doesn't fit the grammar.
            MissingExtraError: llguidance isn't installed.
            EngineError: the check failed.
        """
        misfit = "the grammar. Ask again without continuing it, or continue it without a grammar."
        return self._matcher("grammar", lark, so_far, misfit)

    def matcher_of_calls(self, lark: str, so_far: str = "") -> Matcher:
        """A matcher for one reply that calls tools. The first for some tools can take seconds.

        Args:
            lark: a grammar from `grammar_of_calls`.
            so_far: the answer's beginning if a reply is continued.

        Raises:
            RequestError: the tools' grammar is too complex, or `so_far` doesn't fit it.
            MissingExtraError: llguidance isn't installed.
        """
        misfit = "the calls that it has to make. Ask again without continuing it, or leave the choice of tools open."
        return self._matcher("lark", lark, so_far, misfit)

    def _matcher(self, kind: Kind, text: str, so_far: str, misfit: str) -> Matcher:
        state = self._compiled(kind, text).deep_copy()
        if so_far and not state.consume_tokens(self._tokenizer.encode_plain(so_far)):
            raise RequestError(f"The reply that is to be continued doesn't fit {misfit}")
        return Matcher(state, self._not_the_end)

    def _compile(self, kind: Kind, text: str) -> LLMatcher:
        # Safe here after the child's check; for Lark, `grammar_of_calls` has made it.
        if kind == "strict":
            check_json_schema(text)
        elif kind == "grammar":
            check_grammar(text)
        make_matcher = _llguidance().LLMatcher
        make = functools.partial(make_matcher, self._vocabulary.table, log_level=0, limits=grammar_check.limits())
        compiled = _with_a_deep_stack(lambda: make(grammar_check.grammar_of(kind, text)))
        if not compiled.is_error():
            return compiled
        reason = _first_line(compiled.get_error())
        refused = {"strict": refusal, "grammar": refusal_of_grammar}.get(kind, refusal_of_tools)
        raise refused(reason)


class Matcher:
    """Follows one reply's answer through its grammar.

    Attributes:
        while_thinking: bool `[vocab_size]`, ids allowed before the answer: all except the reply's end, because a reply
            without an answer fits no schema.
    """

    def __init__(self, state: LLMatcher, while_thinking: torch.Tensor) -> None:
        self._state = state
        self.while_thinking = while_thinking

    def copy(self) -> Matcher:
        """An independent copy."""
        return Matcher(self._state.deep_copy(), self.while_thinking)

    def allowed(self) -> torch.Tensor:
        """bool `[vocab_size]`: ids allowed next in the answer; only the reply's end if no other is.

        Raises:
            RequestError: the schema is too complex to follow, or nothing may come next.
        """
        with _failures_in_words():
            packed = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        self._check()
        if not packed.any():
            raise _cannot_follow("nothing may come next")
        # Embedding rows without a token are False.
        bits = np.unpackbits(packed, count=len(self.while_thinking), bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token_id: int) -> None:
        """Advances by an allowed token.

        Raises:
            RequestError: the schema is too complex to follow.
        """
        with _failures_in_words():
            self._state.consume_token(token_id)
        self._check()

    def forced(self) -> list[int]:
        """The ids with which the answer probably goes on, since the grammar allows one text only; may be none.

        None after a failure, too: `allowed` tells of it.
        """
        try:
            with _failures_in_words():
                return list(self._state.compute_ff_tokens())
        except RequestError:
            return []

    def _check(self) -> None:
        if self._state.is_error():
            raise _cannot_follow(_first_line(self._state.get_error()))


@contextlib.contextmanager
def _failures_in_words() -> Iterator[None]:
    """Turns the library's failures, also panics, which aren't Exceptions, into the error of one request."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        logger.warning("llguidance failed", exc_info=error)
        raise _cannot_follow("the library fails on it") from None


def _cannot_follow(reason: str) -> RequestError:
    return RequestError(
        f"This reply can no longer follow its JSON schema, its grammar or its tools ({reason}). Take fewer properties "
        "and choices, and simpler patterns."
    )


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".: ")[:200]


def _with_a_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    with ThreadPoolExecutor(1) as thread:
        # The stack size is per process, and another thread may compile at the same time.
        with _stack_lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                made = thread.submit(make)
            finally:
                threading.stack_size(before)
        return made.result()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("A reply that follows a JSON schema", "schema") from error
    return llguidance
