"""What is known about a model, wherever it runs: its name, its defaults and its abilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen35mm.contract.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A model as surfaces show and use it.

    An ability is None while it is unknown, until a server's model was tried. An ability that turns out to be missing is
    False in a new ModelInfo from then on.

    Attributes:
        name: a folder's name, a Hub id, or a server's name for it.
        generation: its sampling defaults.
        default_enable_thinking: whether it thinks by default.
        weights: the format of its matrices; None if unknown.
        host: the server that answers, as host and port; None for a model in this process.
        images: whether it sees pictures.
        videos: whether it takes whole videos; if not, but it sees pictures, videos are sent as frames with times.
        thinking: whether its thinking can be turned on and off.
        tools, schemas: whether it takes tools, and answers in a JSON schema.
        continues: whether it can continue a reply that ended early.
        exact_counts: whether `count_tokens` is exact, not an estimate.
        template_options: the further variables that its chat template reads, and the values of each if they are known,
            else none. Empty if its template is unknown.
        unsupported: fields of SamplingParams that it lacks; a request with one raises an error.
        adapters: names of the adapters that a request may choose.
    """

    name: str
    generation: SamplingParams
    default_enable_thinking: bool
    weights: str | None = None
    host: str | None = None
    images: bool | None = True
    videos: bool | None = True
    thinking: bool | None = True
    tools: bool | None = True
    schemas: bool | None = True
    continues: bool | None = True
    exact_counts: bool = True
    template_options: Mapping[str, tuple[bool | str, ...]] = field(default_factory=dict)
    unsupported: frozenset[str] = field(default=frozenset())
    adapters: tuple[str, ...] = ()
