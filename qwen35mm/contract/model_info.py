"""What is told of a model, wherever it runs: its name, its defaults, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwen35mm.contract.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A model as a surface shows it and asks it.

    Whether a server's model has an ability is None where nobody knows before it was tried. What it turns out not to
    have is False in a new ModelInfo from then on.

    Attributes:
        name: what to call it: a folder's name, a Hub id, or a server's name for it.
        generation: its sampling defaults.
        default_enable_thinking: whether it thinks where nobody says.
        weights: the format of its matrices; None where that isn't known.
        host: the server that answers, as host and port; None for a model in this process.
        images: whether it sees pictures.
        videos: whether it is given whole videos; where not, but it sees pictures, they are sent as frames with times.
        thinking: whether its thinking can be turned on and off.
        tools, schemas: whether it takes tools, and answers in a JSON schema.
        continues: whether it can go on with a reply that ended early.
        exact_counts: whether `count_tokens` gives the prompt's number of tokens, and no estimate.
        unsupported: fields of SamplingParams that it can't be asked for; a request with one is refused in words.
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
    unsupported: frozenset[str] = field(default=frozenset())
