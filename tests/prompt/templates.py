"""Variants of the demo's chat template: the switches of newer ones, and one that takes system messages anywhere."""

from __future__ import annotations

_SYSTEM = "{%- set system = "
_THOUGHT = "{%- if loop.index0 > query.index -%}"
_NO_QUERY = "{%- if query.index < 0 -%}{{- raise_exception('There is no user message.') -}}{%- endif -%}"
_LATER = "{{- raise_exception('The system message must be the first.') -}}"
_EFFORT = """
{%- set effort = reasoning_effort | default('xhigh') -%}
{%- if effort not in ('low', 'medium', 'xhigh') -%}{{- raise_exception('No such effort: ' ~ effort) -}}{%- endif -%}
{%- if enable_thinking and effort != 'medium' -%}
    {{- '<|im_start|>system\\nEffort: ' ~ effort ~ '<|im_end|>\\n' -}}
{%- endif -%}
"""
_ALWAYS = """
{%- if enable_thinking is defined and not enable_thinking -%}{{- raise_exception('I always think.') -}}{%- endif -%}
"""


def _with(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


def switching(source: str, *, preserves: bool = False) -> str:
    """With `preserve_thinking` and `reasoning_effort`.

    Args:
        preserves: whether thinking is preserved by default.
    """
    preserve = "preserve_thinking is undefined or preserve_thinking" if preserves else "preserve_thinking"
    source = _with(source, _THOUGHT, f"{{%- if {preserve} or loop.index0 > query.index -%}}")
    return _with(source, _SYSTEM, _EFFORT + _SYSTEM)


def always_thinking(source: str) -> str:
    """It refuses to turn thinking off."""
    return _ALWAYS + source


def lenient(source: str) -> str:
    """It writes system messages at their places and needs no user's message."""
    later = "{{- '<|im_start|>system\\n' ~ (body(message.content, true, true) | trim) ~ '<|im_end|>\\n' -}}"
    return _with(_with(source, _LATER, later), _NO_QUERY, "")
