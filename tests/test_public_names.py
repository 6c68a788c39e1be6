"""The public names are the ones that are promised, and each of them can be imported."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import qwen35mm
import qwen35mm.errors
import qwen35mm_preprocess
from tests.children import environment
from tests.test_layering import modules

# Errors that never leave the part of the program that raises them.
INNER_ERRORS = {
    *("AnswerError", "ApiError", "DownloadCancelled", "EngineLostError", "Fault", "FloodError", "NonsenseError"),
    *("HttpError", "JsonLimitError", "OtherModelError", "RefusalError", "TooManyTokensError", "WorkError"),
}

PUBLIC = {
    "BatchError",
    "CacheReport",
    "CacheSettings",
    "Chat",
    "CheckpointError",
    "ConfigError",
    "ContextTooLongError",
    "EngineError",
    "EngineSettings",
    "Event",
    "Finished",
    "FunctionStream",
    "GenerationRequest",
    "Image",
    "LoadedModel",
    "LocalBackend",
    "McpTools",
    "MediaBudget",
    "MediaError",
    "MediaLimits",
    "MediaPlan",
    "MediaPlanned",
    "Message",
    "Prefilled",
    "Progress",
    "PromptError",
    "PromptRead",
    "QueueFullError",
    "Qwen35mmError",
    "RemoteBackend",
    "ReplyStream",
    "RequestError",
    "RequestTimeoutError",
    "Result",
    "SamplingParams",
    "Score",
    "Text",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "ToolResult",
    "Video",
    "VideoClip",
    "__version__",
    "load",
    "pin_plans",
}


def test_the_public_names_are_the_promised_ones() -> None:
    assert set(qwen35mm.__all__) == PUBLIC
    assert set(dir(qwen35mm)) == PUBLIC
    assert [name for name in sorted(PUBLIC) if getattr(qwen35mm, name, None) is None] == []


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys, qwen35mm, qwen35mm.errors; sys.exit(len({'torch', 'numpy', 'PIL', 'av'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qwen35mm.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_each_package_lists_its_names() -> None:
    own = ("cache", "config", "contract", "engine", "errors", "model", "prompt")
    for package in ("qwen35mm_kernels", "qwen35mm_preprocess", *(f"qwen35mm.{name}" for name in own)):
        module = importlib.import_module(package)
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert [f"{package}.{name}" for name in module.__all__ if not hasattr(module, name)] == []


def test_every_public_error_is_a_qwen35mm_error() -> None:
    packages = (qwen35mm, qwen35mm.errors, qwen35mm_preprocess)
    found = [getattr(package, name) for package in packages for name in package.__all__ if name.endswith("Error")]
    assert len(set(found)) > 30
    assert [error for error in found if not issubclass(error, qwen35mm.errors.Qwen35mmError)] == []
    assert issubclass(qwen35mm.MediaError, ValueError), "as it has always been"


def test_no_error_has_another_root() -> None:
    roots = {"Exception", "ValueError", "RuntimeError", "TypeError", "OSError", "KeyError"}
    classes = [
        found
        for _, path in modules()
        for found in re.findall(r"^class ([A-Z]\w*)\(([^)]*)\):", path.read_text("utf-8"), re.MULTILINE)
    ]
    other = {name for name, bases in classes if {base.strip() for base in bases.split(",")} & roots}
    assert other - INNER_ERRORS == {"Qwen35mmError", "MediaError"}
