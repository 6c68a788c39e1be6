"""DSPy (through LiteLLM): predictions and an agent."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from checks import BASE, MODEL, run

WHO = 'Who? SAY<<{"reasoning": "Known.", "name": "Ann", "age": 3}>>'


def _model(**more):
    return dspy.LM(f"openai/{MODEL}", api_base=f"{BASE}/v1", api_key="none", cache=False, num_retries=0, **more)


def plain():
    assert "sunny" in _model()("Hello")[0]


def responses():
    answer = _model(model_type="responses")("Hello")[0]
    assert "sunny" in (answer["text"] if isinstance(answer, dict) else answer)


def json_adapter():
    with dspy.context(lm=_model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict("question -> name: str, age: int")(question=WHO).age == 3


def reasoning():
    with dspy.context(
        lm=_model(reasoning_effort="low", allowed_openai_params=["reasoning_effort"]), adapter=dspy.JSONAdapter()
    ):
        assert dspy.ChainOfThought("question -> name: str, age: int")(question=WHO).age == 3


def n_answers():
    assert len(_model(n=2, temperature=1.0)("Hello")) == 2


if __name__ == "__main__":
    run(plain, responses, json_adapter, reasoning, n_answers)
