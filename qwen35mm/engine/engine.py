"""The engine: requests in, events out, one bounded piece of work per `step()`.

It is synchronous, knows no threads and does no input or output. One request runs at a time, in order of
arrival; the others wait. A step encodes a few vision layers, prefills one piece, or decodes one token,
so a cancelled request is gone before the next step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch

from qwen35mm.cache import CachePools
from qwen35mm.engine.events import Finished, Progress, TextDelta
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.engine.request import Request, StepOutput
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.sequence import Sequence, prefill_pieces
from qwen35mm.engine.vision import VisionEncoding
from qwen35mm.errors import ConfigError, ContextTooLongError, EngineError, QueueFullError
from qwen35mm.model import LoadedModel

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 32_768


@dataclass(frozen=True)
class EngineSettings:
    """How much the engine may hold.

    Attributes:
        context_length: most tokens of a prompt and its reply; None takes the checkpoint's limit, at most 32,768.
        piece_tokens: most prompt tokens of one step.
        max_waiting: requests that may wait before further ones are refused.
    """

    context_length: int | None = None
    piece_tokens: int = 512
    max_waiting: int = 16

    def __post_init__(self) -> None:
        for name in ("context_length", "piece_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}.")


class Engine:
    """Serves requests on one loaded model.

    Args:
        loaded: the model with its tokenizer and defaults.
        settings: limits.

    Raises:
        ConfigError: the context asked for is longer than the model's positions.
    """

    def __init__(self, loaded: LoadedModel, settings: EngineSettings | None = None) -> None:
        self.loaded = loaded
        self.settings = settings or EngineSettings()
        config = loaded.config
        limit = config.text.max_position_embeddings
        self.context_length = self.settings.context_length or min(limit, DEFAULT_CONTEXT_LENGTH)
        if self.context_length > limit:
            raise ConfigError(f"A context of {self.context_length:,} tokens was asked for; this model has {limit:,}.")
        self._pools = CachePools(
            config,
            num_slots=1,
            num_tokens=self.context_length,
            dtype=loaded.model.dtype,
            device=loaded.model.device,
        )
        self._thinking = ThinkingTokens.from_tokenizer(loaded.tokenizer)
        self._banned_ids = _ids_never_sampled(loaded)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: Sequence | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do anything."""
        return self._running is not None or bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started yet."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the waiting line.

        Raises:
            ContextTooLongError: the prompt leaves no room for a reply.
            QueueFullError: `max_waiting` requests wait already.
        """
        num_tokens = len(request.prompt.token_ids)
        if num_tokens >= self.context_length:
            raise ContextTooLongError(
                f"The conversation has {num_tokens:,} tokens and the context holds {self.context_length:,}, reply "
                "included. Start a new chat, send fewer or smaller pictures and videos, or raise the context length."
            )
        if len(self._waiting) >= self.settings.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already. Try again in a moment.")
        self._waiting[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Ends a request, whatever its phase, and frees what it holds; an unknown one may just have ended."""
        if self._waiting.pop(request_id, None) is None and self._running_is(request_id):
            self._release()

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Does one piece of work of the oldest request; returns what there is to tell.

        An error in the model ends that request with an `EngineError`; the engine goes on.
        """
        admitted: list[StepOutput] = []
        if self._running is None:
            if not self._waiting:
                return []
            admitted = self._admit()
        sequence = self._running
        if sequence is None:
            return admitted
        try:
            events = {"encode": self._encode, "prefill": self._prefill, "decode": self._decode}[sequence.phase](
                sequence
            )
        except Exception as error:
            logger.exception("request %s failed while it was in phase %s", sequence.request.id, sequence.phase)
            return [*admitted, self._fail(sequence.request.id, error)]
        outputs = [StepOutput(sequence.request.id, event) for event in events]
        if sequence.output.finish_reason is not None:
            outputs.append(StepOutput(sequence.request.id, Finished(sequence.result(sequence.output.finish_reason))))
            self._release()
        return admitted + outputs

    def check_integrity(self) -> None:
        """Asserts that every block and state is either free or held by the running request."""
        self._pools.check_integrity([self._running.cache] if self._running else [])

    def _admit(self) -> list[StepOutput]:
        request_id, request = self._waiting.popitem(last=False)
        try:
            self._running = self._start(request)
        except Exception as error:
            logger.exception("request %s could not start", request_id)
            return [self._fail(request_id, error)]
        total = len(self._waiting)
        return [StepOutput(id_, Progress("wait", ahead, total)) for ahead, id_ in enumerate(self._waiting, start=1)]

    def _start(self, request: Request) -> Sequence:
        loaded, prompt = self.loaded, request.prompt
        output = OutputProcessor(
            loaded.tokenizer,
            request.params,
            eos_ids=loaded.eos_ids,
            thinking=self._thinking,
            in_thinking=self._opens_thinking(request),
        )
        sampler = Sampler(
            request.params,
            prompt_token_ids=prompt.token_ids.tolist(),
            banned_ids=self._banned_ids,
            vocab_size=loaded.config.text.vocab_size,
        )
        vision = VisionEncoding(loaded.model.visual, request.media)
        cache = self._pools.new_sequence()
        cache.rope_delta = prompt.rope_delta
        sequence = Sequence(request, cache, vision, sampler, output)
        sequence.pieces = list(prefill_pieces(prompt, self.settings.piece_tokens))
        return sequence

    def _opens_thinking(self, request: Request) -> bool:
        """Whether the prompt's last thinking token opens the thinking."""
        if self._thinking is None:
            return False
        for token_id in reversed(request.prompt.token_ids[request.prompt.tail_start :].tolist()):
            if token_id in (self._thinking.start_id, self._thinking.end_id):
                return token_id == self._thinking.start_id
        return False

    def _encode(self, sequence: Sequence) -> list[Progress]:
        sequence.vision.step()
        return [Progress("encode", sequence.vision.done, sequence.vision.total)]

    def _prefill(self, sequence: Sequence) -> list[Progress | TextDelta]:
        prompt, model = sequence.request.prompt, self.loaded.model
        if sequence.vision_features is None:
            sequence.vision_features = sequence.vision.features()
        start, stop = sequence.pieces.pop(0)
        embeds = model.embed_tokens(torch.tensor(prompt.token_ids[start:stop], device=model.device))
        self._place_vision(sequence, embeds, start, stop)
        positions = torch.tensor(prompt.positions[:, start:stop], device=model.device)
        hidden = model.prefill(embeds, positions, sequence.cache)
        events: list[Progress | TextDelta] = [Progress("prefill", stop, len(prompt.token_ids))]
        if not sequence.pieces:
            sequence.vision_features = None
            events += self._next_token(sequence, model.logits(hidden[-1:])[0])
        return events

    def _place_vision(self, sequence: Sequence, embeds: torch.Tensor, start: int, stop: int) -> None:
        """Writes the vision features over the placeholders' embeddings of one piece."""
        offset = 0
        for span in sequence.request.prompt.spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                features = sequence.vision_features
                assert features is not None, "a span without media"
                rows = features[offset + low - span.start : offset + high - span.start]
                embeds[low - start : high - start] = rows.to(embeds.dtype)
            offset += span.stop - span.start

    def _decode(self, sequence: Sequence) -> list[TextDelta]:
        model, cache = self.loaded.model, sequence.cache
        positions = torch.full((3, 1), cache.next_position, dtype=torch.int64, device=model.device)
        token_ids = torch.tensor([sequence.last_token_id], device=model.device)
        hidden = model.decode(token_ids, positions, [cache])
        return self._next_token(sequence, model.logits(hidden)[0])

    def _next_token(self, sequence: Sequence, logits: torch.Tensor) -> list[TextDelta]:
        output = sequence.output
        token_id = output.next_forced()
        if token_id is None:
            token_id = sequence.sampler.sample(logits)
        else:
            sequence.sampler.observe(token_id)
        sequence.last_token_id = token_id
        sequence.token_time()
        deltas = output.push(token_id)
        # The new token needs a place in the cache before the next one can follow.
        if output.finish_reason is None and sequence.cache.length >= self.context_length:
            deltas += output.close("length")
        return deltas

    def _running_is(self, request_id: str) -> bool:
        return self._running is not None and self._running.request.id == request_id

    def _release(self) -> None:
        if self._running is not None:
            self._running.cache.free()
            self._running = None

    def _fail(self, request_id: str, error: Exception) -> StepOutput:
        self._release()
        if isinstance(error, torch.OutOfMemoryError):
            message = "Memory ran out while this was computed. Use smaller pictures, fewer frames or a shorter chat."
        else:
            message = f"The model failed on this request ({type(error).__name__}); the log has the details. Try again."
        return StepOutput(request_id, EngineError(message))


def _ids_never_sampled(loaded: LoadedModel) -> set[int]:
    """Vision tokens, which only a prompt's media may place, and rows of the embedding that stand for no token."""
    config, tokenizer = loaded.config, loaded.tokenizer
    banned = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    banned |= {id_ for text, id_ in tokenizer.control_ids.items() if text.startswith("<|vision_")}
    return banned | set(range(tokenizer.vocab_size, config.text.vocab_size))
