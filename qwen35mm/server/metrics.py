"""Counters and gauges for Prometheus, with our own names and Prometheus' units."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from qwen35mm.contract import Event, Finished, PromptRead, Result
from qwen35mm.server.generation import ServedBackend
from qwen35mm.server.queue import FairQueue

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .*)")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts requests and tokens since the start.

    Attributes:
        registry: this server's own, separate from others of the process.
    """

    def __init__(self, backend: ServedBackend, queue: FairQueue) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("qwen35mm_requests", "Requests by their end.", ["end"], registry=registry)
        self._prompt = Counter("qwen35mm_prompt_tokens", "Tokens of prompts.", ["source"], registry=registry)
        self._generated = Counter("qwen35mm_generated_tokens", "Tokens of replies.", registry=registry)
        self._first = Histogram(
            "qwen35mm_time_to_first_token_seconds", "From a request's turn on.", buckets=_SECONDS, registry=registry
        )
        self._running = Gauge("qwen35mm_requests_running", "Requests with the engine.", registry=registry)
        waiting = Gauge("qwen35mm_requests_waiting", "Requests in the queue.", registry=registry)
        waiting.set_function(lambda: queue.num_waiting)
        memory = Gauge("qwen35mm_cache_bytes", "What the cache holds.", ["part"], registry=registry)
        for part in ("kv", "states", "vision"):
            memory.labels(part).set_function(lambda part=part: backend.memory()[f"{part}_bytes"])

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestMetrics]:
        """Counts one request, however it ends."""
        counted = RequestMetrics()
        end = "cancelled"
        with self._running.track_inprogress():
            try:
                yield counted
                end = counted.finish_reason or end
            except Exception:
                end = "error"
                raise
            finally:
                self._requests.labels(end).inc()
        result = counted.result
        if result is not None:
            self._prompt.labels("cached").inc(result.cache.num_cached_tokens)
            self._prompt.labels("computed").inc(result.num_prompt_tokens - result.cache.num_cached_tokens)
            self._generated.inc(result.num_generated_tokens)
            if result.ttft_s is not None:
                self._first.observe(result.ttft_s)
        elif counted.read is not None:
            self._prompt.labels("cached").inc(counted.read.cache.num_cached_tokens)
            self._prompt.labels("computed").inc(counted.read.cache.num_prefilled_tokens)


class RequestMetrics:
    """Measures one request."""

    def __init__(self) -> None:
        self.result: Result | None = None
        self.read: PromptRead | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.result is None:
            return None if self.read is None else "read"
        return self.result.finish_reason

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.result = event.result
        elif isinstance(event, PromptRead):
            self.read = event


def labelled(texts: Mapping[str, str], label: str) -> str:
    """Merges Prometheus texts of several engines or models; each sample gets a label with its text's key."""
    families: dict[str, list[str]] = {}
    for key, text in texts.items():
        heads: list[str] = []
        name, value = "", key.replace("\\", "\\\\").replace('"', '\\"')
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                heads = families.setdefault(name, [])
                if line not in heads:
                    heads.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [found[2], f'{label}="{value}"']))
                families[name].append(f"{found[1]}{{{labels}}}{found[3]}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
