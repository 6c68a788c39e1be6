"""Detects refusals, in the languages in which these models refuse."""

from __future__ import annotations

import re

REFUSAL = "refusal"

_DO = (
    "assist|help|describe|identify|provide|fulfil|comply|process|see|view|access|open|answer|discuss|analy[sz]e|"
    "recogni[sz]e|caption|create|generate|write|share|transcribe|engage|continue|determine|display|support|do that"
)
_REFUSALS = (
    rf"(?:i(?:['’]?m| am) (?:very |so |truly |really )?sorry|(?:i )?apologi[sz]e|my apologies|sorry|unfortunately)?"
    rf"(?:\W| but| that| however)*"
    rf"(?:as an ai(?: language| assistant)?(?: model)?,? )?"
    rf"i(?: can(?:['’]?t|not| not)|['’]?m (?:not able|unable|not allowed|not comfortable)(?: to)?|"
    rf" am (?:not able|unable|not allowed|not comfortable)(?: to)?| won['’]?t(?: be able to)?|"
    rf" don['’]?t feel comfortable)"
    rf"\s+(?:\w+ly )?(?:{_DO})",
    r"as an ai(?: language| assistant)?(?: model)?\b",
    r"(?:(?:非常|很|真的)?(?:抱歉|对不起|對不起)[，,。！! ]*)(?:但)?我?(?:无法|不能|無法|没办法|沒辦法)",
    r"我(?:无法|不能|無法)(?:描述|提供|识别|協助|协助|帮助|回答|处理|查看|生成)",
    r"申し訳(?:ありません|ございません)",
    r"(?:(?:es )?tut mir leid|entschuldigung|leider)[, ]+(?:aber )?(?:ich )?(?:kann|darf)(?: ich)?\b.{0,40}\bnicht",
    r"(?:je suis )?désolée?[, ]+(?:mais )?je ne (?:peux|suis) pas",
    r"(?:lo siento|lo lamento)[, ]+(?:pero )?no puedo",
)
_REFUSAL = re.compile(rf"\W*(?:{'|'.join(_REFUSALS)})", re.IGNORECASE)


def is_refusal(text: str) -> bool:
    """Whether a reply begins with a refusal. Such words in quotation marks, or later, don't count."""
    # Text in quotation marks was read from the picture.
    return text[:1] not in "\"'“„«「『" and _REFUSAL.match(text) is not None
