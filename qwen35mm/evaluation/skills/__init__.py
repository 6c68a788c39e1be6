"""The demo model's skills. Each module draws questions with one right answer."""

from __future__ import annotations

from qwen35mm.evaluation.skills import asking, chat, clips, describing, pictures, recall, relations, structured, tools
from qwen35mm.evaluation.skills.base import Skill

# In the order of the table in the model card.
_GROUPS = (
    describing.SKILLS, asking.SKILLS, relations.SKILLS, structured.SKILLS, pictures.SKILLS, asking.FOLLOW_UPS,
    clips.SKILLS, recall.SKILLS, tools.SKILLS, chat.SKILLS,
)  # fmt: skip
SKILLS: dict[str, Skill] = {skill.name: skill for group in _GROUPS for skill in group}
