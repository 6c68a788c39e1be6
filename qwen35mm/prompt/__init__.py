"""From messages to prompts: token ids with media spans, M-RoPE positions, segments and tail.

The checkpoint's chat template is rendered; outside text is tokenized separately.
"""

from qwen35mm.prompt.build import Prompt, PromptBuilder
from qwen35mm.prompt.carry import is_carried, is_ordinary
from qwen35mm.prompt.layout import Span
from qwen35mm.prompt.segments import DEFAULT_MIN_SEGMENT, Segment, SegmentEnd, cut_segments
from qwen35mm.prompt.template import ChatTemplate

__all__ = [
    "DEFAULT_MIN_SEGMENT",
    "ChatTemplate",
    "Prompt",
    "PromptBuilder",
    "Segment",
    "SegmentEnd",
    "Span",
    "cut_segments",
    "is_carried",
    "is_ordinary",
]
