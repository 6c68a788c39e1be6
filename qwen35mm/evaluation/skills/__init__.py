"""What the demo model can do, a file a skill or family of skills: each draws questions with one right answer."""

from __future__ import annotations

from qwen35mm.evaluation.skills import (
    asking,
    chat,
    clips,
    declining,
    describing,
    followups,
    pictures,
    reading,
    recall,
    relations,
    structured,
    tools,
    two_counts,
)
from qwen35mm.evaluation.skills.base import Skill

_MODULES = (
    describing, asking, two_counts, relations, structured, reading, pictures, followups, clips, recall, tools, chat,
    declining,
)  # fmt: skip
SKILLS: dict[str, Skill] = {skill.name: skill for module in _MODULES for skill in module.SKILLS}
