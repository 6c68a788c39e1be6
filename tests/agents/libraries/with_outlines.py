"""Outlines, with OpenAI's client, and as of a server of vLLM's or SGLang's. The model must be a real one."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import outlines
from checks import BASE, MODEL, run
from outlines.types import CFG, Regex
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)


class Answer(BaseModel):
    """Short for any model: one that rambles would be cut off in a text."""

    is_known: bool
    kind: Literal["child", "adult"]


def plain():
    assert outlines.from_openai(client, MODEL)("Hello")


def structured():
    assert json.loads(outlines.from_openai(client, MODEL)("Who?", Answer))["kind"] in ("child", "adult")


def vllm_structured():
    assert json.loads(outlines.from_vllm(client, MODEL)("Who?", Answer))["kind"] in ("child", "adult")


def vllm_choice():
    assert outlines.from_vllm(client, MODEL)("Yes or no?", Literal["yes", "no"]) in ("yes", "no")


def vllm_regex():
    assert re.fullmatch("[0-9]{3}", outlines.from_vllm(client, MODEL)("A number?", Regex("[0-9]{3}")))


def vllm_grammar():
    assert outlines.from_vllm(client, MODEL)("Yes or no?", CFG('start: "yes" | "no"')) in ("yes", "no")


def sglang_regex():
    assert re.fullmatch("[0-9]{3}", outlines.from_sglang(client, MODEL)("A number?", Regex("[0-9]{3}")))


def sglang_structured():
    assert json.loads(outlines.from_sglang(client, MODEL)("Who?", Answer))["kind"] in ("child", "adult")


if __name__ == "__main__":
    run(
        plain,
        structured,
        vllm_structured,
        vllm_choice,
        vllm_regex,
        vllm_grammar,
        sglang_regex,
        sglang_structured,
    )
