"""The engine: requests in, events out, one bounded piece of work per `step()`.

It is synchronous, knows no threads and does no input or output; what must be read or written is handed to a
`Background`. A step runs at most one piece of one prompt (some vision layers, or one piece of prefill), then one token
of every running reply. History commits are computed when nothing else is to do.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import torch

from qwen35mm.cache import Background, CacheSettings, Inline, OutOfBlocksError, SequenceCache
from qwen35mm.engine.commits import Commits
from qwen35mm.engine.decoding import DecodeBatch, Decoder, HostDecoder
from qwen35mm.engine.device_decoding import DeviceDecoder
from qwen35mm.engine.events import Finished, Progress
from qwen35mm.engine.failures import engine_error
from qwen35mm.engine.grammar import Grammars, Matcher
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.request import CachedPrompt, Request, StepOutput
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sampler import Sampler, ids_never_sampled
from qwen35mm.engine.sequence import Next, Reply, Sequence
from qwen35mm.engine.settings import EngineSettings, decode_rows
from qwen35mm.errors import (
    ContextTooLongError,
    EngineError,
    QueueFullError,
    Qwen35mmError,
    RequestError,
    RequestTimeoutError,
)
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaError

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on one loaded model.

    Args:
        loaded: the model with its tokenizer and defaults.
        settings: how much is done at once.
        cache: how much is kept.
        background: reads and writes files; None does it at once, inside the step.
        clock: seconds, for deadlines; the one that requests' times are of.

    Raises:
        ConfigError: a setting can't be used, or the memory can't hold one sequence of the context asked for.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings | None = None,
        cache: CacheSettings | None = None,
        *,
        background: Background | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loaded = loaded
        self.settings = settings or EngineSettings()
        self.runtime = Runtime.make(loaded, self.settings, cache or CacheSettings(), background or Inline())
        self._clock = clock
        self._thinking = ThinkingTokens.from_tokenizer(loaded.tokenizer)
        self._banned_ids = ids_never_sampled(loaded)
        self._grammars = Grammars(loaded.tokenizer, eos_ids=loaded.eos_ids, vocab_size=loaded.config.text.vocab_size)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._sequences: dict[str, Sequence] = {}
        self._prefilling: Sequence | None = None
        self._num_rows = decode_rows(self.settings, loaded.model.device, loaded.model.dtype)
        self._batch = DecodeBatch(self.runtime, self._decoder())
        self._commits = Commits(self.runtime)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its reply."""
        return self.runtime.context_length

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do anything, now or once a file is read."""
        runtime = self.runtime
        can_write = runtime.disk is not None and runtime.disk.can_write()
        return self.has_requests or bool(self._commits) or runtime.has_unsettled or can_write

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits for a token."""
        return bool(self._sequences or self._waiting)

    @property
    def writing(self) -> bool:
        """Whether entries that were handed to the disk's writer aren't written yet."""
        return self.runtime.disk is not None and self.runtime.disk.writing

    @property
    def blocked(self) -> bool:
        """Whether `step()` would only find that a file isn't read yet."""
        if self._batch.running or self._batch.suspended:
            return False
        if self._prefilling is not None:
            return self._prefilling.prefill.blocked
        return not self._waiting and self._commits.blocked

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started yet."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the waiting line.

        Raises:
            ContextTooLongError: the prompt leaves no room for a reply.
            QueueFullError: `max_waiting` requests wait already.
            RequestError: more choices than slots, a JSON schema that replies can't be held to, or a reply to be
                continued that doesn't fit it.
            MissingExtraError: a JSON schema needs a library that isn't installed.
        """
        num_tokens = len(request.prompt.token_ids)
        if num_tokens >= self.context_length:
            raise ContextTooLongError(
                f"The conversation has {num_tokens:,} tokens and the context holds {self.context_length:,}, reply "
                "included. Start a new chat, send fewer or smaller pictures and videos, or raise the context length."
            )
        if not 1 <= request.num_choices <= self.settings.slots:
            raise RequestError(
                f"{request.num_choices} replies were asked for; this engine computes 1 to {self.settings.slots} at a "
                "time (its slots)."
            )
        if len(self._waiting) >= self.settings.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already. Try again in a moment.")
        self._matcher(request)
        self._waiting[request.id] = request
        self._commits.supersede(request.conversation)

    def commit(self, source: CachedPrompt) -> None:
        """Computes the segments of a finished conversation for its next turn, once there is nothing else to do."""
        if self.runtime.reuse and len(source.prompt.token_ids) <= self.context_length:
            self._commits.add(source)

    def cancel(self, request_id: str) -> None:
        """Ends a request, whatever its phase, and frees what it holds; an unknown one may just have ended."""
        if self._waiting.pop(request_id, None) is None and request_id in self._sequences:
            self._close(self._sequences[request_id])

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Does one bounded piece of work; returns what there is to tell.

        An error ends the request that it happened in, or all running ones where the model failed on their common
        step, with a Qwen35mmError as their last event; the engine goes on.
        """
        outputs = self._end_late()
        self._batch.resume()
        if self._prefilling is None:
            self.runtime.settle()
            outputs += self._admit()
        alone = not self._batch.can_step
        if self._prefilling is not None:
            outputs += self._advance(self._prefilling)
        if alone and self._batch.can_step and not self._waiting:
            return outputs  # a reply has begun: its first token is told before its second one is computed
        if self._batch.can_step:
            outputs += self._decode()
        elif not (self.has_requests or outputs):
            self._idle_step()
        return outputs

    def flush(self) -> None:
        """Hands everything that the disk lacks to its writer and waits for it; ends pending commits."""
        self._commits.clear()
        disk = self.runtime.disk
        if disk is not None:
            disk.flush()

    def check_integrity(self) -> None:
        """Asserts that every block, state and pin belongs to a running request, a commit or the cache."""
        prefills = [sequence.prefill for sequence in self._sequences.values()] + self._commits.prefills
        caches: list[SequenceCache] = [cache for sequence in self._sequences.values() for cache in sequence.caches]
        caches += [cache for prefill in self._commits.prefills for cache in prefill.sequences]
        self.runtime.prefixes.check_integrity(caches, [prefill.start for prefill in prefills if prefill.start])
        self.runtime.vision.check_integrity()

    def _end_late(self) -> list[StepOutput]:
        now = self._clock()
        running = [sequence.request for sequence in self._sequences.values()]
        late = [r for r in (*self._waiting.values(), *running) if r.deadline_s is not None and r.deadline_s <= now]
        outputs = []
        for request in late:
            self.cancel(request.id)
            message = "The time allowed for this request is over. Allow more, or ask for a shorter answer."
            outputs.append(StepOutput(request.id, RequestTimeoutError(message)))
        return outputs

    def _admit(self) -> list[StepOutput]:
        """Takes the next request out of the line, if there is a slot and room for it."""
        if not self._waiting or self._batch.suspended:
            return []
        request = next(iter(self._waiting.values()))
        num_running = len(self._batch.running)
        if num_running + request.num_choices > self.runtime.slots:
            return []
        if num_running and not self._batch.has_room(len(request.prompt.token_ids)):
            return []
        del self._waiting[request.id]
        try:
            sequence = Sequence(request, Prefill(self.runtime, request))
        except Exception as error:
            logger.exception("request %s could not start", request.id)
            return [StepOutput(request.id, engine_error(error, self.runtime.model.device))]
        self._sequences[request.id] = self._prefilling = sequence
        total = len(self._waiting)
        return [StepOutput(id_, Progress("wait", ahead, total)) for ahead, id_ in enumerate(self._waiting, start=1)]

    def _advance(self, sequence: Sequence) -> list[StepOutput]:
        """One piece of the prompt in hand; its replies begin when that was the last."""
        request_id = sequence.request.id
        try:
            outputs = [StepOutput(request_id, progress) for progress in sequence.prefill.step()]
            if sequence.prefill.done:
                self._prefilling = None
                outputs += self._begin_replies(sequence)
        except OutOfBlocksError as error:
            return self._wait_for_room(sequence, error)
        except (Qwen35mmError, MediaError) as error:
            self._close(sequence)
            return [StepOutput(request_id, error)]
        except Exception as error:
            logger.exception("request %s failed before its first token", request_id)
            self._close(sequence)
            return [StepOutput(request_id, engine_error(error, self.runtime.model.device))]
        return outputs

    def _wait_for_room(self, sequence: Sequence, error: OutOfBlocksError) -> list[StepOutput]:
        """The prompt in hand finds no blocks: a commit gives way, or it waits, or suspended replies go first."""
        if self._commits.give_way() or self._batch.running or sequence.prefill.unpin():
            return []
        if self._batch.suspended:
            self._requeue(sequence)
            return []
        self._close(sequence)
        return [StepOutput(sequence.request.id, error)]

    def _begin_replies(self, sequence: Sequence) -> list[StepOutput]:
        """Samples the first token of each choice; all of them stand on the same blocks."""
        request, prefill = sequence.request, sequence.prefill
        assert prefill.last_hidden is not None
        logits = self.runtime.model.logits(prefill.last_hidden, num_rows=self._num_rows)[0]
        for choice in range(request.num_choices):
            cache = prefill.cache if choice == 0 else prefill.cache.clone()
            sampler, output, matcher = self._sampler(request, choice), self._output(request), self._matcher(request)
            sequence.replies.append(Reply(sequence, choice, cache, sampler, output, matcher))
        following = [self._batch.begin(reply, logits) for reply in sequence.replies]
        return [output for each in following for output in self._take(each)]

    def _decode(self) -> list[StepOutput]:
        if not self._batch.prepare():
            return self._give_way_to(self._batch.running[0])
        try:
            results = self._batch.step()
        except Exception as error:
            failed = list(dict.fromkeys(reply.sequence for reply in self._batch.running))
            logger.exception("the model failed on %s", ", ".join(sequence.request.id for sequence in failed))
            for sequence in failed:
                self._close(sequence)
            return [
                StepOutput(sequence.request.id, engine_error(error, self.runtime.model.device)) for sequence in failed
            ]
        return [output for following in results for output in self._take(following)]

    def _take(self, following: Next) -> list[StepOutput]:
        """A reply's next token, and its end where that was the last."""
        reply = following.reply
        request, choice = reply.request, reply.choice
        if self._sequences.get(request.id) is not reply.sequence or reply.output.finish_reason is not None:
            return []  # it ended while the device was a step ahead, or another of its choices has just failed
        try:
            outputs = [StepOutput(request.id, event, choice) for event in reply.take(following, self.context_length)]
        except Exception as error:
            logger.exception("request %s failed on its next token", request.id)
            self._close(reply.sequence)
            return [StepOutput(request.id, engine_error(error, self.runtime.model.device))]
        if reply.output.finish_reason is not None:
            result = reply.result(reply.output.finish_reason, self.runtime.pools)
            outputs.append(StepOutput(request.id, Finished(result), choice))
            reply.free()
            self._batch.remove(reply)
            if all(other.output.finish_reason is not None for other in reply.sequence.replies):
                self._close(reply.sequence)
        return outputs

    def _give_way_to(self, reply: Reply) -> list[StepOutput]:
        """The only running reply finds no block: whoever else holds some gives them back, and has to begin again."""
        sequence = self._prefilling
        if self._commits.give_way():
            return []
        if sequence is not None:
            self._requeue(sequence)
            return []
        logger.error("a single reply of %s finds no room; the memory plan is wrong", reply.request.id)
        self._close(reply.sequence)
        return [
            StepOutput(reply.request.id, EngineError("The cache is full. Start a new chat, or use a larger cache."))
        ]

    def _requeue(self, sequence: Sequence) -> None:
        """Gives back what a prompt in hand holds; it is first in line, and computed again."""
        self._close(sequence)
        self._waiting[sequence.request.id] = sequence.request
        self._waiting.move_to_end(sequence.request.id, last=False)

    def _idle_step(self) -> None:
        disk = self.runtime.disk
        if self._commits:
            self._commits.step()
        elif disk is not None:
            disk.write_next()

    def _close(self, sequence: Sequence) -> None:
        """Takes a request out of everything and gives back what it holds."""
        self._sequences.pop(sequence.request.id, None)
        if self._prefilling is sequence:
            self._prefilling = None
        for reply in sequence.replies:
            self._batch.remove(reply)
        sequence.close()

    def _decoder(self) -> Decoder:
        model = self.runtime.model
        if self.settings.decodes_on_device(model.device):
            return DeviceDecoder(self.runtime, sorted(self._banned_ids), num_rows=self._num_rows)
        return HostDecoder(model, num_rows=self._num_rows)

    def _sampler(self, request: Request, choice: int) -> Sampler:
        params = request.params
        if choice and params.seed is not None:
            params = params.with_overrides(seed=(params.seed + choice) % 2**63)
        return Sampler(
            params,
            prompt_token_ids=request.prompt.token_ids.tolist(),
            banned_ids=self._banned_ids,
            vocab_size=self.loaded.config.text.vocab_size,
        )

    def _output(self, request: Request) -> OutputProcessor:
        return OutputProcessor(
            self.loaded.tokenizer,
            request.params,
            eos_ids=self.loaded.eos_ids,
            thinking=self._thinking,
            num_thought=self._num_thought(request),
        )

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
                return len(thought) if self.loaded.tokenizer.decode(thought).strip("\n") else 0
        return None
