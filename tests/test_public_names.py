"""The public names are the ones that are promised, and each can be had."""

from __future__ import annotations

import importlib

import pytest

import qwen35mm

PUBLIC = {
    "CacheReport",
    "CacheSettings",
    "EngineSettings",
    "Event",
    "Finished",
    "Image",
    "LoadedModel",
    "LocalBackend",
    "MediaBudget",
    "MediaError",
    "MediaLimits",
    "MediaPlan",
    "MediaPlanned",
    "Message",
    "Prefilled",
    "Progress",
    "Qwen35mmError",
    "Result",
    "SamplingParams",
    "Text",
    "TextDelta",
    "ToolCall",
    "Video",
    "__version__",
    "load",
    "pin_plans",
}


def test_the_public_names_are_the_promised_ones() -> None:
    assert set(qwen35mm.__all__) == PUBLIC
    assert set(dir(qwen35mm)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_public_name_resolves(name: str) -> None:
    assert getattr(qwen35mm, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qwen35mm.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "package",
    [
        "qwen35mm_kernels",
        "qwen35mm_preprocess",
        "qwen35mm.cache",
        "qwen35mm.config",
        "qwen35mm.engine",
        "qwen35mm.errors",
        "qwen35mm.model",
        "qwen35mm.prompt",
    ],
)
def test_each_package_lists_its_names(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name), f"{package}.{name}"
