"""The page's texts about work in progress and about an answer's cost."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.chat.replies.stats import Tally
from qwen35mm.chat.settings import LENGTHS, SAMPLING
from qwen35mm.chat.store.records import Node
from qwen35mm.contract import ModelInfo, Progress
from qwen35mm_preprocess.say import Said, decimal, percent, say, size, tokens

# Why there was no cache hit, or no longer one.
_MISSED = {
    "new content": say("the rest is new"),
    "evicted": say("the rest was evicted"),
    "different media": say("the rest has other pictures"),
    "other model": say("the rest is another model's"),
}
_READING = {
    "image": say("Reading image"),
    "images": say("Reading images"),
    "video": say("Reading video"),
    "both": say("Reading images and videos"),
}
_ENCODING = {
    "image": say("Encoding image"),
    "images": say("Encoding images"),
    "video": say("Encoding video"),
    "both": say("Encoding images and videos"),
}
_COUNTS = (
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_cached_tokens",
    "num_encoded_units",
    "num_cached_units",
)


def work_of(
    node: Node, progress: Progress | None, path: Sequence[Node], tally: Tally | None = None
) -> dict[str, Any] | None:
    """The work in progress for a reply, `{"label", "share", "pace"}`.

    `share` is None if unknown; `pace` has the token count and speed while the reply is written, as parts of a line.
    """
    if node.status != "running":
        return None
    if progress is None:
        label = say("Writing") if node.text else say("Thinking") if node.reasoning else say("Waiting for the model")
        share, pace = None, _pace(tally)
    else:
        (label, share), pace = _phase(progress, path), []
    return {"label": label, "share": share, "pace": pace}


def describe_stats(stats: Mapping[str, Any] | None) -> list[tuple[Said, Said]] | None:
    """What a reply cost, as names and values; None if the numbers are invalid."""
    try:
        return _describe(stats) if stats else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # an archive may bring any object


def describe_memory(memory: Mapping[str, int]) -> dict[str, Any]:
    """A line about how full the cache's budgets are, and the share of the fullest one."""
    parts, shares = [], [0.0]
    for name in ("kv", "states", "vision"):
        used, budget = memory.get(f"{name}_bytes", 0), memory.get(f"{name}_budget_bytes", 0)
        if budget:
            parts.append(_held(name, size(used), size(budget)))
            shares.append(used / budget)
    words = say("Cache: {parts}", parts=_listed(parts)) if parts else ""
    return {"words": words, "share": min(max(shares), 1.0)}


def describe_server(model: ModelInfo) -> dict[str, Any] | None:
    """The host of a server's model, and what it can't do; None for a model in this process."""
    if model.host is None:
        return None
    notes = []
    if not model.exact_counts:
        notes.append(say("What a message costs is an estimate: the server doesn't count tokens."))
    if model.images is False:
        notes.append(say("It can't see pictures or videos."))
    elif model.videos is not True:
        notes.append(say("Videos are sent as frames, each with its time."))
    if model.thinking is False:
        notes.append(say("Its thinking can't be turned on or off."))
    if model.continues is False:
        notes.append(say("It can't continue an answer that ended early."))
    missing = [field.label for name, field in {**SAMPLING, **LENGTHS}.items() if name in model.unsupported]
    if missing:
        notes.append(say("Can't be set on this server: {names}", names=_listed(missing)))
    return {"host": model.host, "notes": notes, "continues": model.continues, "images": model.images}


def _pace(tally: Tally | None) -> list[Said]:
    if tally is None or tally.num_tokens is None:
        return []
    speed = tally.tokens_per_s
    return [tokens(tally.num_tokens), *([] if speed is None else [say("{n} tokens/s", n=decimal(speed, 1))])]


def _describe(stats: Mapping[str, Any]) -> list[tuple[Said, Said]]:
    # Checks the numbers, so that no string or object reaches the page in their place.
    counts = {name: operator.index(stats[name]) for name in _COUNTS}
    num_generated, speed, ttft = counts["num_generated_tokens"], stats["tokens_per_s"], stats["ttft_s"]
    num_prompt, num_cached = counts["num_prompt_tokens"], counts["num_cached_tokens"]
    rows: list[tuple[Said, Said]] = [(say("Answer"), _written(num_generated, stats.get("num_thinking_tokens")))]
    if speed is not None:
        words = say("{n} tokens per second, {s} s", n=decimal(speed, 1), s=decimal(stats["decode_s"], 1))
        rows.append((say("Speed"), words))
    if num_accepted := operator.index(stats.get("num_accepted_tokens") or 0):
        # Each accepted token saved a step.
        a_step = num_generated / max(num_generated - num_accepted, 1)
        rows.append((say("Tokens a step"), decimal(a_step, 1)))
    if ttft is not None:
        rows.append((say("First token after"), say("{s} s", s=decimal(ttft, 2))))
    computed = say("{tokens}, {n} of them computed", tokens=tokens(num_prompt), n=num_prompt - num_cached)
    rows.append((say("Prompt"), computed))
    rows.append((say("From the cache"), _cached(num_cached, stats["cached_from"], _MISSED.get(stats["miss"] or ""))))
    if num_evicted := operator.index(stats.get("num_evicted_tokens") or 0):
        rows.append((say("Evicted"), say("keys and values of {tokens}", tokens=tokens(num_evicted))))
    if counts["num_encoded_units"] or counts["num_cached_units"]:
        words = say("{a} encoded, {b} from the cache", a=counts["num_encoded_units"], b=counts["num_cached_units"])
        rows.append((say("Pictures and clips"), words))
    if stats["cache_bytes"] is not None:
        rows.append((say("Memory"), size(operator.index(stats["cache_bytes"]))))
    if stats.get("seed") is not None:
        rows.append((say("Seed"), str(stats["seed"])))
    return rows


def _written(num_generated: int, num_thinking: int | None) -> Said:
    if not num_thinking:
        return tokens(num_generated)
    return say("{tokens}, {n} of them thinking", tokens=tokens(num_generated), n=operator.index(num_thinking))


def _cached(num_cached: int, cached_from: Mapping[str, Any], miss: Said | None) -> Said:
    if not num_cached:
        return say("nothing: {why}", why=miss) if miss else say("nothing")
    found = _listed([_in_tier(tier, operator.index(num)) for tier, num in cached_from.items() if num])
    if miss:
        return say("{tokens} ({found}); {why}", tokens=tokens(num_cached), found=found, why=miss)
    return say("{tokens} ({found})", tokens=tokens(num_cached), found=found)


def _in_tier(tier: str, number: int) -> Said:
    return {
        "device": say("{n} in memory", n=number),
        "host": say("{n} in the machine's memory", n=number),
        "disk": say("{n} on disk", n=number),
    }[tier]


def _held(name: str, used: Said, budget: Said) -> Said:
    return {
        "kv": say("KV {used} of {budget}", used=used, budget=budget),
        "states": say("states {used} of {budget}", used=used, budget=budget),
        "vision": say("pictures {used} of {budget}", used=used, budget=budget),
    }[name]


def _listed(parts: Sequence[Said]) -> Said:
    if not parts:
        return say("nothing")
    return functools.reduce(lambda first, rest: say("{first}, {rest}", first=first, rest=rest), parts)


def _phase(progress: Progress, path: Sequence[Node]) -> tuple[Said, float | None]:
    done, total = progress.done, progress.total
    if progress.phase == "load":
        return say("Loading the model"), None
    if progress.phase == "wait":
        return (say("Waiting in the queue, {n} ahead", n=done) if done else say("Waiting in the queue")), None
    share = min(done / total, 1.0) if total else None
    if progress.phase == "prefill":
        return say("{work}, {done}/{total} tokens", work=say("Reading the prompt"), done=done, total=total), share
    kinds = [attachment.kind for node in path[-1:] for attachment in node.attachments if attachment.kind != "text"]
    video = "video" in kinds
    name = ("video" if video else "image") if len(kinds) == 1 else "both" if video else "images"
    if progress.phase == "encode":
        return say("{work}, {share}", work=_ENCODING[name], share=percent(share or 0.0)), share
    if video and total > 1:
        return say("{work}, {done}/{total} frames", work=_READING[name], done=done, total=total), share
    return _READING[name], share
