"""Server programs and their abilities, recognized by what the server says about itself.

program             recognized by          videos  continues  top_k, penalties     schemas  counts tokens by
vLLM                owned_by: vllm         ?       yes        yes                  yes      /tokenize
SGLang              owned_by: sglang       ?       yes        yes                  yes      -
llama-server        owned_by: llamacpp     /props  yes        as repeat_penalty    yes      /apply-template
qwen35mm serve      owned_by: qwen35mm     yes     yes        yes                  yes      /v1/messages
transformers serve  its route /load_model  yes     no         refused or ignored   ignored  -
any other           -                      ?       ?          if they are set      ?        -
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeGuard

from qwen35mm.contract import ModelInfo, SamplingParams
from qwen35mm.contract.sampling import row_numbers
from qwen35mm.errors import ConfigError

Counting = Literal["vllm", "llamacpp", "qwen35mm"]

# The model authors' advice without thinking; few servers report their model's defaults.
ADVISED = SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
# The context length of a server that doesn't report it.
ASSUMED_CONTEXT = 131_072
# Python's integers are unbounded; code that divides or stores a server's counts needs a bound.
MAX_COUNT = 2**53


@dataclass(frozen=True)
class Program:
    """A server program's abilities, whatever its model.

    Attributes:
        key: the owner that it reports for its models; empty if unknown.
        names: the request's names, by our field, of the SamplingParams outside OpenAI's API.
        ignores: fields of SamplingParams that it neither obeys nor refuses.
        chooses_tools: whether it obeys a `tool_choice`.
        stream_fields: fields that make it report the most numbers about a reply.
        videos, tools, schemas, thinking, continues: see `ModelInfo`.
        counting: how it counts a prompt's tokens; None if it can't.
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
        """Fields of SamplingParams that it lacks."""
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
# Fields that our own server takes, and an unknown one may.
_EVERY = {name: (name,) for name in row_numbers() if name not in OPENAI} | _ENDS
_EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# The second is llama-server's name; each server ignores the other's.
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
    """What a server reports about its model.

    Attributes:
        context_length: most tokens of a conversation; None if not reported.
        generation: its sampling defaults; None if not reported.
    """

    program: Program = UNKNOWN
    context_length: int | None = None
    images: bool | None = None
    generation: SamplingParams | None = None

    @classmethod
    def read(cls, entry: object) -> Told:
        """Reads an entry of /v1/models."""
        values = entry if isinstance(entry, dict) else {}
        meta = found if isinstance(found := values.get("meta"), dict) else {}
        lengths = [values.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")]
        owner = values.get("owned_by")
        program = _PROGRAMS.get(owner, UNKNOWN) if isinstance(owner, str) else UNKNOWN
        images = True if program.key == "qwen35mm" else None
        return cls(program, next((each for each in lengths if is_count(each)), None), images)

    def with_props(self, props: object) -> Told:
        """Adds llama-server's /props."""
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
        """The model as surfaces show and use it. It thinks only on request."""
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
    """Whether this is a possible number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_COUNT


def is_transformers(document: object) -> bool:
    """Whether an OpenAPI document is that of `transformers serve`, which doesn't name itself."""
    paths = document.get("paths") if isinstance(document, dict) else None
    return isinstance(paths, dict) and {"/load_model", "/v1/chat/completions"} <= paths.keys()


def _generation(params: object) -> SamplingParams | None:
    """llama-server's sampling defaults, as far as we have the same parameters."""
    values: dict[str, Any] = params if isinstance(params, dict) else {}
    program = _PROGRAMS["llamacpp"]
    numbers = {name: number for name, number in row_numbers().items() if name not in program.unsupported}
    found = {name: values.get(program.names.get(name, (name,))[0]) for name in numbers}
    # Its numbers have 32 bits.
    given: dict[str, Any] = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in found.items()
        if isinstance(value, int | float) and not numbers[name].is_off(value)
    }
    try:
        return SamplingParams(**given) if given else None
    except ConfigError:
        return None
