"""Which replies are refusals."""

from __future__ import annotations

import pytest

from qwen35mm.captioning.texts.refusals import is_refusal


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that.",
        "I’m sorry, I cannot help with that request.",
        "I am sorry, but I am unable to describe this image.",
        "Sorry, I can't identify people in images.",
        "I cannot provide a description of this image.",
        "I can't help with identifying the person.",
        "I'm unable to process the image.",
        "Unfortunately, I'm not able to view images.",
        "I apologize, but I cannot fulfill this request.",
        "As an AI language model, I do not have eyes.",
        "I won't describe this.",
        "**I'm sorry**, but I can't help.",
        "抱歉，我无法描述这张图片。",
        "很抱歉，我不能协助处理该请求。",
        "我无法识别图片中的人物。",
        "申し訳ありませんが、お手伝いできません。",
        "Es tut mir leid, aber ich kann dieses Bild nicht beschreiben.",
        "Leider kann ich das nicht tun.",
        "Je suis désolé, mais je ne peux pas décrire cette image.",
        "Lo siento, pero no puedo ayudar con eso.",
    ],
)
def test_refusals(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "A sign that says \"I'm sorry, I can't help you\".",
        "\"I'm sorry, I can't help you\" is written on a wall.",
        "„Es tut mir leid, ich kann nicht“ steht auf dem Schild.",
        "I'm sorry I missed the train, says the speech bubble.",
        "Sorry board with a sad face.",
        "A man who cannot see crosses the street.",
        "I can has cheezburger",
        "Unfortunately placed sign.",
        "I can't believe it's not butter",
        "The letter I cannot be read.",
        "I am Groot",
        "抱歉，店铺今日休息",
        "Leider geschlossen",
        "",
    ],
)
def test_captions_and_texts_that_are_none(text: str) -> None:
    assert not is_refusal(text)
