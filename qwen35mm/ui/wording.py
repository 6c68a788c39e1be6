"""What the page says of the work in progress, and of what an answer cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.conversation.tree import Node
from qwen35mm.engine.events import Progress, Result

# Why nothing, or no more, came from the cache.
_MISSED = {
    "new content": "the rest is new",
    "evicted": "more had been evicted",
    "different media": "other pictures stand in the rest",
    "other model": "more is another model's",
}


def work_of(node: Node, progress: Progress | None, path: Sequence[Node]) -> dict[str, Any] | None:
    """What is going on for a reply, `{"label", "share"}`; `share` is None where no share of it is known."""
    if node.status != "running":
        return None
    if progress is None:
        label, share = ("Writing" if node.text else "Thinking" if node.reasoning else "Getting ready"), None
    else:
        label, share = _phase(progress, path)
    return {"label": label, "share": share}


def stats_of(result: Result) -> dict[str, Any]:
    """The numbers of a finished reply that are kept with it; JSON values."""
    cache = result.cache
    return {
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_generated_tokens": result.num_generated_tokens,
        "tokens_per_s": result.decode_tokens_per_s,
        "ttft_s": result.ttft_s,
        "seed": result.seed,
        "num_cached_tokens": cache.num_cached_tokens,
        "cached_from": dict(cache.cached_from),
        "miss": cache.miss,
        "num_encoded_units": cache.num_encoded_units,
        "num_cached_units": cache.num_cached_units,
        "prefill_s": cache.prefill_s,
        "decode_s": cache.decode_s,
        "cache_bytes": cache.cache_bytes,
    }


def describe_stats(stats: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """One line on what a reply cost, and the details as names and values; None where its numbers can't be read."""
    try:
        return _describe(stats) if stats else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # an archive may bring any object


def describe_memory(memory: Mapping[str, int]) -> dict[str, Any]:
    """A line on what the cache holds of its budgets, and the fullest one's share."""
    parts, shares = [], [0.0]
    for name, words in (("kv", "keys and values"), ("states", "states"), ("vision", "pictures")):
        used, budget = memory.get(f"{name}_bytes", 0), memory.get(f"{name}_budget_bytes", 0)
        if budget:
            parts.append(f"{words} {format_bytes(used)} of {format_bytes(budget)}")
            shares.append(used / budget)
    return {"words": "Cache: " + ", ".join(parts), "share": min(max(shares), 1.0)}


def format_bytes(num_bytes: float) -> str:
    """A size for a person, such as 18 MiB."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:,.0f} {unit}" if num_bytes >= 10 or unit == "bytes" else f"{num_bytes:,.1f} {unit}"


def _describe(stats: Mapping[str, Any]) -> dict[str, Any]:
    num_generated, speed, ttft = stats["num_generated_tokens"], stats["tokens_per_s"], stats["ttft_s"]
    num_prompt, num_cached = stats["num_prompt_tokens"], stats["num_cached_tokens"]
    line = [_tokens(num_generated)]
    rows = [("Answer", _tokens(num_generated))]
    if speed is not None:
        line.append(f"{speed:,.1f} tokens/s")
        rows.append(("Speed", f"{speed:,.1f} tokens a second, {stats['decode_s']:,.1f} s"))
    if ttft is not None:
        rows.append(("First token after", f"{ttft:,.2f} s"))
        line.append(f"first after {ttft:,.1f} s")
    if num_cached:
        line.append(f"{num_cached:,} of {num_prompt:,} prompt tokens cached")
    else:
        line.append(f"prompt of {_tokens(num_prompt)}")
    rows.append(("Prompt", f"{_tokens(num_prompt)}, {num_prompt - num_cached:,} of them computed"))
    rows.append(("From the cache", _cached(stats)))
    if stats["num_encoded_units"] or stats["num_cached_units"]:
        rows.append(
            ("Pictures and clips", f"{stats['num_encoded_units']} encoded, {stats['num_cached_units']} kept before")
        )
    rows.append(("Memory", format_bytes(stats["cache_bytes"])))
    if stats.get("seed") is not None:
        rows.append(("Seed", str(stats["seed"])))
    return {"line": " · ".join(line), "rows": rows}


def _cached(stats: Mapping[str, Any]) -> str:
    num_cached, miss = stats["num_cached_tokens"], _MISSED.get(stats["miss"] or "", "")
    if not num_cached:
        return f"nothing: {miss}" if miss else "nothing"
    places = {"device": "in memory", "host": "in the machine's memory", "disk": "on disk"}
    found = ", ".join(f"{num:,} {places[tier]}" for tier, num in stats["cached_from"].items() if num)
    return f"{_tokens(num_cached)} ({found})" + (f"; {miss}" if miss else "")


def _tokens(number: int) -> str:
    return f"{number:,} token" + ("" if number == 1 else "s")


def _phase(progress: Progress, path: Sequence[Node]) -> tuple[str, float | None]:
    done, total = progress.done, progress.total
    if progress.phase == "wait":
        return (f"Waiting in line, {done} ahead" if done else "Waiting in line"), None
    share = min(done / total, 1.0) if total else None
    if progress.phase == "prefill":
        return f"Reading the prompt, {done:,}/{total:,} tokens", share
    kinds = [attachment.kind for node in path[-1:] for attachment in node.attachments if attachment.kind != "text"]
    video = "video" in kinds
    name = ("video" if video else "image") if len(kinds) == 1 else "images and videos" if video else "images"
    if progress.phase == "encode":
        return f"Encoding {name}, {0 if share is None else share:.0%}", share
    if video and total > 1:
        return f"Reading {name}, {done:,}/{total:,} frames", share
    return f"Reading {name}", share
