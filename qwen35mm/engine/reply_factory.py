"""What a request's replies are made with: output, grammar, seed."""

from __future__ import annotations

import secrets

from qwen35mm.cache import SequenceCache
from qwen35mm.engine.grammar import Grammars, Matcher
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.engine.request import Request
from qwen35mm.engine.running_request import Reply, RunningRequest
from qwen35mm.model import LoadedModel


class ReplyFactory:
    """Makes the replies of one model's requests."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._eos_ids = loaded.tokenizer, loaded.eos_ids
        self._thinking = ThinkingTokens.from_tokenizer(loaded.tokenizer)
        self._grammars = Grammars(loaded.tokenizer, eos_ids=loaded.eos_ids, vocab_size=loaded.config.text.vocab_size)

    def check(self, request: Request) -> None:
        """Checks that replies can be made.

        Raises:
            RequestError: a JSON schema that replies can't be held to, or a reply to be continued that doesn't fit it.
            MissingExtraError: a JSON schema needs a library that isn't installed.
        """
        self._matcher(request)

    def make(self, running: RunningRequest, choice: int, cache: SequenceCache) -> Reply:
        """A reply whose prompt is in `cache`; each choice has a seed of its own."""
        request, seed = running.request, running.request.params.seed
        output = OutputProcessor(
            self._tokenizer,
            request.params,
            eos_ids=self._eos_ids,
            thinking=self._thinking,
            num_thought=self._num_thought(request),
        )
        seed = secrets.randbits(63) if seed is None else (seed + choice) % 2**63
        return Reply(running, choice, cache, seed, output, self._matcher(request))

    def _matcher(self, request: Request) -> Matcher | None:
        schema = request.params.json_schema
        return None if schema is None else self._grammars.matcher(schema, request.prompt.reply_text)

    def _num_thought(self, request: Request) -> int | None:
        """Tokens of the thought that the prompt leaves open, 0 for line ends alone; None where it leaves none."""
        if self._thinking is None:
            return None
        tail = request.prompt.token_ids[request.prompt.tail_start :].tolist()
        for position in range(len(tail) - 1, -1, -1):
            if tail[position] == self._thinking.end_id:
                return None
            if tail[position] == self._thinking.start_id:
                thought = tail[position + 1 :]
                return len(thought) if self._tokenizer.decode(thought).strip("\n") else 0
        return None
