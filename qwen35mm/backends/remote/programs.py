"""What serves at an address, and what can be asked of it: learned from what it tells of itself.

program             told by                videos  continues  top_k, penalties     schemas  counts tokens by
vLLM                owned_by: vllm         ?       yes        yes                  yes      /tokenize
SGLang              owned_by: sglang       ?       yes        yes                  yes      -
llama-server        owned_by: llamacpp     /props  yes        as repeat_penalty    yes      /apply-template
qwen35mm serve      owned_by: qwen35mm     yes     yes        yes                  yes      /v1/messages
transformers serve  its route /load_model  yes     no         refused or ignored   ignored  -
any other           -                      ?       ?          where they are set   ?        -
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeGuard

from qwen35mm.contract import ModelInfo, SamplingParams
from qwen35mm.contract.sampling import row_numbers
from qwen35mm.errors import ConfigError

Counting = Literal["vllm", "llamacpp", "qwen35mm"]

# What the family's authors advise without thinking; few servers say what their model's are.
ADVISED = SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
# Of a conversation at a server that doesn't say how many tokens it holds.
ASSUMED_CONTEXT = 131_072
# Python's own numbers have no end; whoever divides or stores what a server counts needs one.
MAX_COUNT = 2**53


@dataclass(frozen=True)
class Program:
    """What a server's program takes, whatever its model.

    Attributes:
        key: what it calls itself as the owner of its models; empty where it is none that is known.
        names: the request's fields for those of SamplingParams that aren't in OpenAI's API, by ours.
        ignores: fields of SamplingParams that it neither obeys nor refuses.
        chooses_tools: whether it obeys a `tool_choice`.
        stream_fields: with which it tells most of a reply's numbers.
        videos, tools, schemas, thinking, continues: see `ModelInfo`.
        counting: how it is asked for a prompt's number of tokens; None where it can't be.
    """

    key: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    stream_fields: Mapping[str, Any] = field(default_factory=lambda: {"stream_options": {"include_usage": True}})
    videos: bool | None = None
    tools: bool | None = None
    schemas: bool | None = None
    thinking: bool | None = None
    continues: bool = False
    counting: Counting | None = None
    chooses_tools: bool = True

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields of SamplingParams that it can't be asked for."""
        every = frozenset(each.name for each in fields(SamplingParams))
        return (every - OPENAI - self.names.keys()) | (every & self.ignores)


OPENAI = frozenset(
    {
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
        *("max_tokens", "stop", "json_schema", "logprobs"),
    }
)
_COMMON = {name: (name,) for name in ("top_k", "min_p", "repetition_penalty")}
_ENDS = {name: (name,) for name in ("min_tokens", "ignore_eos", "stop_token_ids")}
# What our own server takes, and one that is not known may.
_EVERY = {name: (name,) for name in row_numbers() if name not in OPENAI} | _ENDS
_EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# The second is llama-server's name; each server passes over the other's.
UNKNOWN = Program(names=_EVERY | {"repetition_penalty": ("repetition_penalty", "repeat_penalty")})
TRANSFORMERS = Program(
    "transformers",
    # It takes a frequency penalty for a repetition penalty.
    ignores=frozenset({"presence_penalty", "frequency_penalty", "logit_bias", "json_schema", "logprobs"}),
    videos=True,
    tools=True,
    schemas=False,
    thinking=True,
    stream_fields={},
    chooses_tools=False,
)
_PROGRAMS = {
    program.key: program
    for program in (
        Program(
            "vllm",
            _COMMON | _ENDS,
            stream_fields=_EACH_USAGE,
            schemas=True,
            thinking=True,
            continues=True,
            counting="vllm",
        ),
        Program("sglang", _COMMON | _ENDS, stream_fields=_EACH_USAGE, schemas=True, thinking=True, continues=True),
        Program(
            "llamacpp",
            _COMMON
            | {
                "repetition_penalty": ("repeat_penalty",),
                "thinking_budget": ("thinking_budget_tokens",),
                "ignore_eos": ("ignore_eos",),
                "typical_p": ("typical_p",),
                "top_n_sigma": ("top_n_sigma",),
            },
            stream_fields={
                "stream_options": {"include_usage": True},
                "timings_per_token": True,
                "return_progress": True,
            },
            videos=False,
            tools=True,
            schemas=True,
            thinking=True,
            continues=True,
            counting="llamacpp",
        ),
        Program(
            "qwen35mm",
            _EVERY | {"thinking_budget": ("thinking_budget",)},
            videos=True,
            tools=True,
            schemas=True,
            thinking=True,
            continues=True,
            counting="qwen35mm",
        ),
        TRANSFORMERS,
    )
}


@dataclass(frozen=True)
class Told:
    """What a server tells of its model.

    Attributes:
        context_length: most tokens of a conversation; None where it doesn't say.
        generation: its sampling defaults; None where it doesn't say.
    """

    program: Program = UNKNOWN
    context_length: int | None = None
    images: bool | None = None
    generation: SamplingParams | None = None

    @classmethod
    def read(cls, entry: object) -> Told:
        """What an entry of /v1/models tells."""
        values = entry if isinstance(entry, dict) else {}
        meta = found if isinstance(found := values.get("meta"), dict) else {}
        lengths = [values.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")]
        owner = values.get("owned_by")
        program = _PROGRAMS.get(owner, UNKNOWN) if isinstance(owner, str) else UNKNOWN
        images = True if program.key == "qwen35mm" else None
        return cls(program, next((each for each in lengths if is_count(each)), None), images)

    def with_props(self, props: object) -> Told:
        """With what llama-server's /props tells."""
        values = props if isinstance(props, dict) else {}
        settings, kinds, caps = (
            found if isinstance(found := values.get(name), dict) else {}
            for name in ("default_generation_settings", "modalities", "chat_template_caps")
        )
        length, template = settings.get("n_ctx"), values.get("chat_template")
        program = replace(
            self.program,
            videos=kinds.get("video") is True,
            tools=caps.get("supports_tools") is not False,
            thinking=not isinstance(template, str) or "enable_thinking" in template,
        )
        return replace(
            self,
            program=program,
            context_length=length if is_count(length) else self.context_length,
            images=bool(kinds["vision"]) if "vision" in kinds else self.images,
            generation=_generation(settings.get("params")),
        )

    def info(self, name: str, host: str) -> ModelInfo:
        """The model as a surface shows it and asks it. A server isn't asked to think unless somebody wants it."""
        program, neutral = self.program, SamplingParams()
        defaults = self.generation or ADVISED
        defaults = replace(defaults, **{each: getattr(neutral, each) for each in program.unsupported})
        return ModelInfo(
            name,
            defaults,
            default_enable_thinking=False,
            host=host,
            images=self.images,
            videos=program.videos,
            thinking=program.thinking,
            tools=program.tools,
            schemas=program.schemas,
            continues=program.continues,
            exact_counts=program.counting is not None,
            unsupported=program.unsupported,
        )


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number that tokens can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_COUNT


def is_transformers(document: object) -> bool:
    """Whether an OpenAPI document is that of `transformers serve`, which gives itself no name."""
    paths = document.get("paths") if isinstance(document, dict) else None
    return isinstance(paths, dict) and {"/load_model", "/v1/chat/completions"} <= paths.keys()


def _generation(params: object) -> SamplingParams | None:
    """llama-server's defaults, as far as they are ours."""
    values: dict[str, Any] = params if isinstance(params, dict) else {}
    program = _PROGRAMS["llamacpp"]
    numbers = {name: number for name, number in row_numbers().items() if name not in program.unsupported}
    found = {name: values.get(program.names.get(name, (name,))[0]) for name in numbers}
    # Its numbers are of 32 bits.
    given: dict[str, Any] = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in found.items()
        if isinstance(value, int | float) and value != numbers[name].off
    }
    try:
        return SamplingParams(**given) if given else None
    except ConfigError:
        return None
