"""What the tests of the cache share: tiny models that can chat, conversations, and replies with their logits."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from qwen35mm.cache import CachePools, CacheSettings
from qwen35mm.cache.gates import gate_shapes, gates_file
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.contract import (
    EncodedMedium,
    Finished,
    Image,
    Message,
    Part,
    Result,
    SamplingParams,
    Text,
    Video,
    iter_media,
)
from qwen35mm.engine import CachedPrompt, Engine, EngineSettings, Request, StepOutput
from qwen35mm.engine.reply import Reply, StepResult
from qwen35mm.model import Batch, LoadedModel, load
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.prompt import PromptBuilder
from qwen35mm_preprocess import MediaProcessor, PreparedMedia
from tests.checkpoints import ggufs
from tests.tiny import TinySpec, config_dict, randomize

T = TypeVar("T")

DENSE = TinySpec("chat-dense", num_layers=2, interval=2, value_heads=4, seed=11)
MOE = TinySpec("chat-moe", num_layers=2, interval=2, tied=False, moe=True, seed=12)
# Both kinds of model, and both dtypes.
MODELS = ((DENSE, "float32"), (MOE, "bfloat16"))

MIN_SEGMENT = 32
CONTEXT = 1024
# Several segments and pieces in a conversation of a few hundred tokens.
SETTINGS = EngineSettings(context_length=CONTEXT, chunk_tokens=64, slots=3, batch_invariant=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)

_VOCABULARY = ("red", "green", "blue", "square", "circle", "star", "left", "right", "above", "below", "many", "few")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qwen35mm-tests-")


@functools.cache
def chat_checkpoint(spec: TinySpec) -> Path:
    """A tiny random checkpoint with a tokenizer, template and ids, which reads media at a few tokens each."""
    source, folder = ggufs.SOURCE, Path(_scratch().name) / spec.name
    ours = json.loads((source / "config.json").read_text())
    values = config_dict(spec)
    ids = {name: value for name, value in ours.items() if name.endswith("_token_id")}
    values |= ids
    values["text_config"] |= {"vocab_size": ours["text_config"]["vocab_size"], "eos_token_id": ids["eos_token_id"]}
    values["text_config"]["max_position_embeddings"] = 16_384
    if spec.moe:
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**values))
    else:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**values))
    randomize(model, spec.seed, tied=spec.tied)
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, folder)
    for name, least, most in (
        ("preprocessor_config.json", 1024, 65_536),
        ("video_preprocessor_config.json", 4096, 65_536),
    ):
        processing = json.loads((source / name).read_text()) | {"size": {"shortest_edge": least, "longest_edge": most}}
        (folder / name).write_text(json.dumps(processing | ({"max_frames": 40} if "video" in name else {})))
    return folder


@functools.cache
def chat_model(spec: TinySpec, dtype: str = "float32") -> LoadedModel:
    """A tiny checkpoint with everything around it, loaded once."""
    return load(chat_checkpoint(spec), dtype=dtype, device="cpu")


@functools.cache
def gates_of(loaded: LoadedModel) -> Path:
    """Untrained gates of a model: they choose something, and always the same."""
    random, config = torch.Generator().manual_seed(5), loaded.config.text
    layers = {
        layer: {name: torch.randn(shape, generator=random) for name, shape in gate_shapes(config, 4).items()}
        for layer in config.attention_layers
    }
    path = Path(_scratch().name) / f"gates-{id(loaded)}.safetensors"
    path.write_bytes(gates_file(layers, weights_digest(loaded.path, None)))
    return path


def picture(seed: int, size: tuple[int, int] = (64, 96)) -> PILImage.Image:
    """Noise that no other seed gives; height and width in pixels."""
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@functools.cache
def clip(num_frames: int = 40) -> Path:
    """A video of changing noise, two frames a second; 40 frames are three units of the vision tower."""
    path = Path(_scratch().name) / f"clip-{num_frames}.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(2), width=64, height=64)
        for seed in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(seed, (64, 64)))))
        container.mux(stream.encode())
    return path


def words(*key: object, count: int = 12) -> str:
    """A text that only this key gives."""
    rng = np.random.default_rng(list(repr(key).encode()))
    return " ".join(rng.choice(_VOCABULARY, count))


def cache_settings(loaded: LoadedModel, *, num_tokens: int = 4096, **options: Any) -> CacheSettings:
    """Room for so many tokens of KV; the planner's own choice would be a pool of gigabytes."""
    token_bytes = loaded.config.kv_bytes_per_token(loaded.model.dtype)
    return CacheSettings(**{"kv_bytes": num_tokens * token_bytes, "state_bytes": 64 << 20, **options})


@dataclass(frozen=True, eq=False)
class Answer:
    """A reply with the logits that each of its tokens was chosen from, [tokens, vocab] float32."""

    result: Result
    logits: torch.Tensor


# By the processing of the checkpoint: many tests show the same pictures and clips.
_prepared: dict[Any, dict[Any, PreparedMedia]] = {}


class Chat:
    """Makes requests of messages for one model, as the backend does, without its threads."""

    def __init__(self, loaded: LoadedModel, *, min_segment: int = MIN_SEGMENT) -> None:
        self.loaded = loaded
        self._prompts = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=min_segment)
        self._processor = MediaProcessor(loaded.image_processing, loaded.video_processing)
        self._prepared = _prepared.setdefault((loaded.image_processing, loaded.video_processing), {})

    def request(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = False,
        continue_reply: bool = False,
        tools: Any = None,
        **options: Any,
    ) -> Request:
        """A request for the next reply; `options` are Request's."""
        media = self.media(messages)
        how = {"enable_thinking": enable_thinking, "continue_reply": continue_reply, "tools": tools}
        prompt = self._prompts.prompt(messages, [medium.plan for medium in media], **how)
        return Request(prompt, media, **{"params": GREEDY, **options})

    def history(
        self, messages: Sequence[Message], *, enable_thinking: bool = False, tools: Any = None, **options: Any
    ) -> CachedPrompt:
        """What is to be committed of messages that end with a reply."""
        media = self.media(messages)
        plans = [medium.plan for medium in media]
        prompt = self._prompts.history(messages, plans, enable_thinking=enable_thinking, tools=tools)
        return CachedPrompt(prompt, media, **options)

    def media(self, messages: Sequence[Message]) -> tuple[PreparedMedia, ...]:
        """The messages' media, each read once."""
        return tuple(self._prepare(part) for part in iter_media(messages))

    def _prepare(self, part: Image | Video) -> PreparedMedia:
        source = part.source
        assert not isinstance(source, PreparedMedia | EncodedMedium)
        key = (source.tobytes(), source.size) if isinstance(source, PILImage.Image) else source
        if key not in self._prepared:
            self._prepared[key] = self._processor.prepare(source, kind=part.kind)
        return self._prepared[key]


def user(*parts: Part | str) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else part for part in parts))


def assistant(text: str, reasoning: str | None = None) -> Message:
    return Message("assistant", (Text(text),), reasoning=reasoning)


def dialog(questions: Sequence[Message], *, system: str | None = None) -> list[Message]:
    """The questions with a reply of its own behind each, the last one left open."""
    messages = [] if system is None else [Message("system", (Text(system),))]
    for index, question in enumerate(questions):
        messages.append(question)
        if index < len(questions) - 1:
            messages.append(assistant(words("reply", index, question.text, count=10)))
    return messages


def turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation as it was asked: up to each of its questions."""
    return [list(messages[: index + 1]) for index, message in enumerate(messages) if message.role == "user"]


@contextmanager
def recording() -> Iterator[Mapping[str, list[torch.Tensor]]]:
    """Collects, by request, the logits that every token is chosen from, the first one's included."""
    logits_of: dict[str, list[torch.Tensor]] = {}
    take = Reply.take

    def watched(self: Reply, result: StepResult, *args: Any) -> Any:
        assert result.logits is not None, "the next step has begun"
        before = len(self.output.token_ids)
        deltas = take(self, result, *args)
        taken = result.logits[: len(self.output.token_ids) - before]
        logits_of.setdefault(self.request.id, []).extend(taken.clone())
        return deltas

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reply, "take", watched)
        yield logits_of


def run(engine: Engine, *requests: Request) -> list[StepOutput]:
    """What the engine says until nothing is left to do."""
    for request in requests:
        engine.add(request)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def results_of(outputs: Sequence[StepOutput]) -> dict[str, Result]:
    """By request."""
    return {o.request_id: o.event.result for o in outputs if isinstance(o.event, Finished)}


def results(engine: Engine, *requests: Request) -> dict[str, Result]:
    """Answers requests together, wherever their tokens are chosen, and does all the work that is left then."""
    outputs = run(engine, *requests)
    errors = [output.event for output in outputs if isinstance(output.event, Exception)]
    assert not errors, errors[0]
    return results_of(outputs)


def launched_one_by_one(engine: Engine) -> Engine:
    """The engine without graphs of prompts' pieces."""
    ways = engine.runtime.pieces
    ways._graphs, ways._to_capture = {}, []
    return engine


def serve(engine: Engine, *requests: Request) -> list[Answer]:
    """`results` with the logits, in the order of the requests."""
    with recording() as logits_of:
        found = results(engine, *requests)
    return [Answer(found[request.id], torch.stack(logits_of[request.id])) for request in requests]


def commit(engine: Engine, history: CachedPrompt) -> None:
    """Has a history computed, to its end."""
    engine.commit(history)
    run(engine)


class Later(Executor):
    """Does what it is handed when it is told to, so that anything may happen before."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.at_once = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.waiting.append(run)
        if self.at_once:
            self.work(len(self.waiting))
        return future

    def work(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            self.waiting.popleft()()


_cold: dict[Any, Answer] = {}


def cold(
    loaded: LoadedModel,
    request: Request,
    settings: EngineSettings = SETTINGS,
    *,
    like: CacheSettings = CacheSettings(),  # noqa: B008 - it is frozen
) -> Answer:
    """The reply of an engine that keeps nothing and serves nobody else, computed once for each prompt.

    Args:
        like: what keys, values and states are kept as.
    """
    kept: dict[str, Any] = {"kv_dtype": like.kv_dtype, "kv_keep": like.kv_keep, "kept_states": like.kept_states}
    kept["kv_gates"] = like.kv_gates
    prompt = request.prompt
    digests = tuple((span.digest, span.grid_thw, span.start) for span in prompt.spans)
    key = (id(loaded), settings, *kept.values(), prompt.token_ids.tobytes(), digests, prompt.segments, request.params)
    if key not in _cold:
        assert settings.context_length is not None
        cache = cache_settings(loaded, num_tokens=settings.context_length, reuse=False, **kept)
        engine = Engine(loaded, settings, cache)
        (_cold[key],) = serve(engine, replace(request, id=f"cold-{len(_cold)}", deadline_s=None))
    return _cold[key]


def assert_same(answer: Answer, expected: Answer) -> None:
    """The same tokens out of the same logits, in every bit."""
    assert answer.result.prompt_token_ids == expected.result.prompt_token_ids
    assert answer.result.token_ids == expected.result.token_ids
    assert torch.equal(answer.logits, expected.logits), (answer.logits - expected.logits).abs().max()


@contextmanager
def small_blocks(block_size: int) -> Iterator[None]:
    """Engines made meanwhile share blocks of so few tokens that small prompts have several."""
    defaults = CachePools.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        for module in ("memory", "runtime"):
            patch.setattr(f"qwen35mm.engine.{module}.DEFAULT_BLOCK_SIZE", block_size)
        patch.setitem(defaults, "block_size", block_size)
        yield


@dataclass
class PrefillCount:
    """What the model was asked to prefill since the last `reset`, in calls of so many tokens.

    `until_first_token` are those before a reply's first token was chosen; history commits come later.
    """

    pieces: list[int] = field(default_factory=list)
    until_first_token: list[int] | None = None

    def reset(self) -> None:
        self.pieces.clear()
        self.until_first_token = None


@contextmanager
def counting_prefill() -> Iterator[PrefillCount]:
    """Counts the tokens of every piece of a prompt that the model has run."""
    count = PrefillCount()
    by_layers, take = Qwen35Model.by_layers, Reply.take

    def watched_layers(self: Qwen35Model, batch: Batch) -> Iterator[torch.Tensor | None]:
        for hidden in by_layers(self, batch):
            if hidden is not None and batch.is_prefill:
                count.pieces.append(len(batch.embeds))
            yield hidden

    def watched_take(self: Reply, *args: Any) -> Any:
        if count.until_first_token is None:
            count.until_first_token = list(count.pieces)
        return take(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen35Model, "by_layers", watched_layers)
        patch.setattr(Reply, "take", watched_take)
        yield count


@contextmanager
def never_saying(token_ids: Collection[int]) -> Iterator[None]:
    """Models choose none of these ids."""
    logits = Qwen35Model.logits

    def without(self: Qwen35Model, hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(self, hidden).clone()
        scores[:, list(token_ids)] = -torch.inf
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen35Model, "logits", without)
        yield


def endless_replies(loaded: LoadedModel) -> AbstractContextManager[None]:
    """Only `max_tokens`, the context or somebody's Stop ends a reply."""
    return never_saying(loaded.eos_ids)
