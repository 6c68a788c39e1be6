"""From messages to prompts: token ids with media spans, M-RoPE positions, segments and tail.

The checkpoint's own chat template is rendered; whatever comes from outside is tokenized apart from it.
"""

from qwen35mm.prompt.build import Prompt, PromptBuilder
from qwen35mm.prompt.layout import Span
from qwen35mm.prompt.messages import Message, Role, iter_media, pin_plans
from qwen35mm.prompt.parts import EncodedMedium, Image, Part, Text, ToolCall, Video
from qwen35mm.prompt.segments import DEFAULT_MIN_SEGMENT, Segment, SegmentEnd, cut_segments
from qwen35mm.prompt.template import ChatTemplate

__all__ = [
    "DEFAULT_MIN_SEGMENT",
    "ChatTemplate",
    "EncodedMedium",
    "Image",
    "Message",
    "Part",
    "Prompt",
    "PromptBuilder",
    "Role",
    "Segment",
    "SegmentEnd",
    "Span",
    "Text",
    "ToolCall",
    "Video",
    "cut_segments",
    "iter_media",
    "pin_plans",
]
