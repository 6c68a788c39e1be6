"""The engine, from a prompt to a stream of events: scheduling, running the model, sampling, text."""

from qwen35mm.engine.async_engine import AsyncEngine
from qwen35mm.engine.call_grammar import constrained_calls
from qwen35mm.engine.engine import Engine
from qwen35mm.engine.grammar import check_constraint, check_grammar, check_json_schema
from qwen35mm.engine.reading import Reading
from qwen35mm.engine.request import (
    CachedPrompt,
    DeferredMedia,
    Request,
    StepOutput,
    check_num_tokens,
    check_token_ids,
)
from qwen35mm.engine.settings import EngineSettings

__all__ = [
    "AsyncEngine",
    "CachedPrompt",
    "DeferredMedia",
    "Engine",
    "EngineSettings",
    "Reading",
    "Request",
    "StepOutput",
    "check_constraint",
    "check_grammar",
    "check_json_schema",
    "check_num_tokens",
    "check_token_ids",
    "constrained_calls",
]
