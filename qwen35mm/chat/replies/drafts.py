"""What a message will cost, and what to do if it doesn't fit."""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qwen35mm.chat.media.plans import completed
from qwen35mm.chat.replies.past import Past
from qwen35mm.chat.replies.prompting import prompt_messages, with_names
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.contract import Backend
from qwen35mm.errors import ContextTooLongError, PromptError
from qwen35mm_preprocess import (
    MediaBudget,
    MediaError,
    MediaPlan,
    MediaProcessor,
    VideoClip,
)
from qwen35mm_preprocess.say import Said, said_of, say, size, tokens

# With less room than this for an answer, in tokens, a message isn't sent.
_LEAST_ANSWER = 128
_LEAST_MEDIUM = 64
# Tokens for a summary and the answer after it.
_SUMMARY = 512
_BLIND = say("This model can't see pictures or videos. Remove this, or choose another model.")
# Any message: the past costs what a prompt with it has more than one without.
_NEXT = Node("0" * 32, None, "user", 0.0, "...")


@dataclass(frozen=True)
class Draft:
    """A message that isn't sent yet.

    Attributes:
        node: the message; `Drafts.plan` gives its media their plans.
        start: index of the first message of the past in its prompt.
        growing: a question and its unfinished answer, after the past.
        limits: media settings of this message alone, in place of `settings`.
        tools: the definitions of the chat's tools, as JSON; empty for none.
    """

    past: Past
    node: Node
    settings: Settings
    start: int = 0
    growing: tuple[Node, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    tools: str = ""

    @property
    def path(self) -> tuple[Node, ...]:
        """The messages before it in its prompt."""
        return (*self.past.path[self.start :], *self.growing)

    def budget(self, default: MediaBudget) -> MediaBudget:
        """The budget of its media, with the machine's defaults for what isn't set."""
        return Settings({**self.settings.values, **self.limits}).budget(default)


class Drafts:
    """Plans and counts drafts. Caches the plan of a file under given limits, and the count of a past.

    In the family's templates the last turn doesn't depend on earlier ones, and control tokens separate it from them.
    So the sum of a past and a message, counted apart, is exact.
    """

    def __init__(self, backend: Backend, media: MediaStore) -> None:
        self._backend = backend
        self._media = media
        self._plan = functools.lru_cache(maxsize=512)(self._make_plan)
        self._count_past = functools.lru_cache(maxsize=512)(self._count_before)

    def plan(self, draft: Draft) -> Draft:
        """The draft with a plan for each medium.

        Raises:
            MediaError: a file can't be read or is over a limit; the message names it.
        """
        return replace(draft, node=replace(draft.node, attachments=tuple(self._planned(draft, draft.node.attachments))))

    def measure(self, draft: Draft) -> dict[str, Any]:
        """What the draft costs and whether it fits, as JSON values for the page."""
        views, planned = [], []
        for attachment in draft.node.attachments:
            try:
                (attachment,) = self._planned(draft, [attachment])
                planned.append(attachment)
                blind = self._backend.info.images is False and attachment.kind != "text"
                views.append({**_cost(attachment), **({"error": _BLIND} if blind else {})})
            except MediaError as error:
                views.append({**_cost(attachment), "error": said_of(error)})
        node = replace(draft.node, attachments=tuple(planned))
        return {"media": views, **self.room(replace(draft, node=node))}

    def room(self, draft: Draft, num_all: int | None = None) -> dict[str, Any]:
        """How much of the context a planned draft takes, and what would fit if it doesn't.

        Args:
            num_all: tokens of its prompt, if known.
        """
        context, reserve = self._backend.context_length, self.reserve
        num_history, estimated = self._estimate(draft)
        num_all = estimated if num_all is None else num_all
        fits = context - num_all >= reserve
        return {
            "tokens": {
                "history": num_history,
                "all": num_all,
                "context": context,
                "reserve": reserve,
                "exact": self._backend.info.exact_counts,
            },
            "fits": fits,
            "offers": [] if fits else self._offers(draft, num_all),
        }

    def count(self, draft: Draft) -> int:
        """Tokens of a planned draft's whole prompt; 0 if it is invalid, which sending it reports."""
        try:
            return self._count([*draft.path, draft.node], draft.settings, draft.tools)
        except PromptError:
            return 0

    @property
    def reserve(self) -> int:
        """Tokens of the context that are reserved for an answer."""
        return answer_reserve(self._backend.context_length)

    def _offers(self, draft: Draft, num_all: int) -> list[dict[str, Any]]:
        offers: list[dict[str, Any]] = []
        limits = self._smaller_limits(draft, num_all)
        if limits:
            kinds = [attachment.kind for attachment in draft.node.attachments if attachment.plan is not None]
            label = _limit_offer(kinds, max(limits.values()))
            offers.append({"kind": "media", "label": label, "settings": limits})
        first = self._first_that_fits(draft)
        if first is not None:
            offers.append(
                {
                    "kind": "shorten",
                    "label": _shorten_offer(first - draft.start),
                    "first": draft.past.path[first].id,
                }
            )
        if draft.path and self.fits(_alone(draft), room=_SUMMARY):
            offers.append({"kind": "summary", "label": say("Start a new chat with a summary of this one")})
        return offers

    def _smaller_limits(self, draft: Draft, num_all: int) -> dict[str, int]:
        """Settings that make the message's media fit; empty if none do."""
        planned = {id(each): each.plan for each in draft.node.attachments if each.plan is not None}
        num_media = sum(plan.num_prompt_tokens for plan in planned.values())
        affordable = (self._backend.context_length - self.reserve - (num_all - num_media)) // max(len(planned), 1)
        if affordable < _LEAST_MEDIUM:
            return {}
        now = draft.budget(self._backend.media.budget)
        limits = {}
        for kind in {plan.kind for plan in planned.values()}:
            name, limit = f"max_{kind}_tokens", now.max_image_tokens if kind == "image" else now.max_video_tokens
            if limit is None or limit > affordable:
                limits[name] = affordable
        attachments = tuple(replace(attachment, plan=None) for attachment in draft.node.attachments)
        node = replace(draft.node, attachments=attachments)
        smaller = replace(draft, node=node, limits={**draft.limits, **limits})
        return limits if limits and self.fits(smaller) else {}

    def _first_that_fits(self, draft: Draft) -> int | None:
        """Index of the oldest question from which on the draft fits; None if no shortening is enough."""
        starts = [at for at, node in enumerate(draft.past.path) if node.role == "user" and at > draft.start]
        found = bisect.bisect_left(starts, True, key=lambda start: self.fits(replace(draft, start=start)))
        return starts[found] if found < len(starts) else None

    def fits(self, draft: Draft, *, room: int | None = None) -> bool:
        """Whether a draft, planned or not, leaves `room` tokens of the context; None reserves room for an answer."""
        try:
            _, num_all = self._estimate(self.plan(draft))
        except MediaError:
            return False
        return num_all + (self.reserve if room is None else room) <= self._backend.context_length

    def _estimate(self, draft: Draft) -> tuple[int, int]:
        """Tokens before a planned draft, and of its whole prompt; 0 if it is invalid."""
        settings, model = draft.settings, self._backend.info
        alone = Settings({"thinking": settings.enable_thinking(model), **settings.switches})
        try:
            how = tuple(sorted(alone.values.items()))
            of_model = (model, self._backend.media)
            num_history = self._count_past(draft.past, draft.start, settings.system, draft.tools, how, *of_model)
            if draft.growing:
                num_history += self._count([*draft.growing, _NEXT], alone) - self._count([_NEXT], alone)
            return num_history, num_history + self._count([draft.node], alone)
        except PromptError:
            return 0, 0

    def _count_before(
        self, past: Past, start: int, system: str, tools: str, how: Sequence[tuple[str, Any]], *_of_model: Any
    ) -> int:
        """Tokens that these messages and tools add to a prompt; `how` are the other settings that change it."""
        if start == len(past.path) and not system and not tools:
            return 0
        alone = dict(how)
        with_them = self._count([*past.path[start:], _NEXT], Settings({"system": system, **alone}), tools)
        return with_them - self._count([_NEXT], Settings(alone))

    def _count(self, path: Sequence[Node], settings: Settings, tools: str = "") -> int:
        messages = prompt_messages(path, self._media, settings.system, self._backend.media)
        model = self._backend.info
        how: dict[str, Any] = {"enable_thinking": settings.enable_thinking(model)}
        how |= {"template_options": settings.template_options(model), "tools": json.loads(tools) if tools else None}
        try:
            return self._backend.count_tokens(messages, **how)
        except ContextTooLongError as error:
            return error.num_tokens or self._backend.context_length  # any count this large says that it doesn't fit
        except MediaError as error:
            files = [attachment for node in path for attachment in node.attachments]
            raise type(error)(with_names(said_of(error), files)) from None

    def _planned(self, draft: Draft, attachments: Sequence[Attachment]) -> list[Attachment]:
        processor = self._backend.media
        budget = draft.budget(processor.budget)
        planned = []
        for attachment in attachments:
            if attachment.kind == "text" or attachment.plan is not None:
                planned.append(attachment)
                continue
            try:
                plan = self._plan(attachment.digest, attachment.kind, budget, processor, attachment.clip)
            except MediaError as error:
                raise type(error)(with_names(said_of(error), [attachment])) from None
            plan = completed(plan, attachment.digest, draft.past.known, processor.video_processing)
            planned.append(replace(attachment, plan=plan))
        return planned

    def _make_plan(
        self, digest: str, kind: Any, budget: MediaBudget, processor: MediaProcessor, clip: VideoClip | None
    ) -> MediaPlan:
        if clip is not None and clip.num_frames is not None:
            # Chosen for this file, but within the machine's limit.
            budget = replace(budget, max_frames=processor.budget.max_frames)
        return replace(processor, budget=budget).plan(self._media.path(digest), kind, clip)


def answer_reserve(context_length: int) -> int:
    """Tokens of a context that are reserved for an answer."""
    return min(_LEAST_ANSWER, context_length // 8)


def _alone(draft: Draft) -> Draft:
    return replace(draft, start=len(draft.past.path), growing=())


def _limit_offer(kinds: Sequence[str], num_tokens: int) -> Said:
    if len(kinds) > 1:
        return say("Limit each picture and clip to {n} tokens", n=num_tokens)
    if kinds[0] == "image":
        return say("Limit the picture to {n} tokens", n=num_tokens)
    return say("Limit the clip to {n} tokens", n=num_tokens)


def _shorten_offer(num_messages: int) -> Said:
    if num_messages == 1:
        return say("Leave the oldest message out of the prompt")
    return say("Leave the oldest {n} messages out of the prompt", n=num_messages)


def _cost_line(plan: MediaPlan) -> Said:
    """For example "12 frames, 1,536 tokens"."""
    num_tokens = tokens(plan.num_prompt_tokens)
    if plan.frame_indices is None:
        return num_tokens
    return say("{first}, {rest}", first=say("{n} {n|frame|frames}", n=len(plan.frame_indices)), rest=num_tokens)


def _step_s(plan: MediaPlan) -> float | None:
    """The mean time between two frames that the model sees of a video."""
    times_s = plan.frame_times_s or ()
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None


def _cost(attachment: Attachment) -> dict[str, Any]:
    """What a medium costs, for its thumbnail."""
    view: dict[str, Any] = {
        "digest": attachment.digest,
        "name": attachment.name,
        "kind": attachment.kind,
        "num_bytes": attachment.num_bytes,
        "notes": [],
        "error": None,
        "label": size(attachment.num_bytes),
    }
    plan = attachment.plan
    if plan is not None:
        view["label"] = _cost_line(plan)
        view["notes"] = [with_names(note, [attachment]) for note in plan.notes]
        view["num_tokens"] = plan.num_prompt_tokens
        view["step_s"] = _step_s(plan)
    return view
