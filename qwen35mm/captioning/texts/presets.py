"""Prompts that are ready to use, each in a wording for images and one for videos."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from qwen35mm_preprocess import MediaKind


@dataclass(frozen=True)
class Preset:
    """A prompt by name.

    Attributes:
        summary: what its captions are, in a line.
        image, video: the prompt for either kind of medium.
    """

    name: str
    summary: str
    image: str
    video: str

    def text(self, kind: MediaKind) -> str:
        """The wording for a kind of medium."""
        return self.image if kind == "image" else self.video


_PRESETS = (
    Preset(
        name="short",
        summary="one sentence",
        image=(
            "Write one sentence of at most 25 words that says what this image shows: the main subject, what it "
            "does, and where. Name only what can be seen. Don't begin with 'The image shows', 'A picture of' or "
            "the like; begin with the subject. Don't judge, guess or add a mood. Answer with the sentence alone."
        ),
        video=(
            "Write one sentence of at most 30 words that says what happens in this video: who or what acts, what "
            "it does from beginning to end, and where. Name only what can be seen. Don't begin with 'The video "
            "shows' or the like; begin with the subject. Don't judge, guess or add a mood. Answer with the "
            "sentence alone."
        ),
    ),
    Preset(
        name="detailed",
        summary="one or two paragraphs, for training data",
        image=(
            "Describe this image in one or two paragraphs, so that somebody could draw it from your words. Say "
            "what the main subjects are, how many, and what each looks like: colours, clothing, material, pose "
            "and expression. Say where each is in the image, what is in front and behind, the setting, the light, "
            "the camera's angle and distance, and the medium, such as photograph, drawing or render. Quote text "
            "that can be read, in its own language. Write plain sentences in the present tense. Don't begin with "
            "'The image shows' or the like. Leave out what can't be seen: names of people, intentions, moods, and "
            "what may lie outside the frame; don't say what is absent. No headings, no lists, no closing summary."
        ),
        video=(
            "Describe this video in one or two paragraphs, so that somebody could film it from your words. Say "
            "what the main subjects are, how many, and what each looks like: colours, clothing, material. Tell in "
            "order what each does, in which direction it moves, and what changes from beginning to end. Say what "
            "the setting and the light are, the camera's angle and distance, whether the camera stands still, "
            "pans, zooms or follows, and where it cuts to another shot. Quote text that can be read, in its own "
            "language. Write plain sentences in the present tense. Don't begin with 'The video shows' or the "
            "like, and don't speak of frames. Leave out what can't be seen: names of people, intentions, moods "
            "and sounds; don't say what is absent. No headings, no lists, no closing summary."
        ),
    ),
    Preset(
        name="tags",
        summary="10 to 30 tags, separated by commas",
        image=(
            "List tags for this image: between 10 and 30, the most important first, separated by commas. Each is "
            "one to three words, in lower case, in the singular. Cover the subjects and how many there are, their "
            "colours, clothing and pose, actions, objects, the setting, the light, the camera's view, and the "
            "medium or style. Give each tag once, and only for what can be seen. No quality tags such as "
            "'masterpiece' or 'high quality', no sentence, no numbering, no full stop. Answer with the list "
            "alone, on one line."
        ),
        video=(
            "List tags for this video: between 10 and 30, the most important first, separated by commas. Each is "
            "one to three words, in lower case, in the singular. Cover the subjects and how many there are, their "
            "colours and clothing, actions and directions of movement, objects, the setting, the light, the "
            "camera's view and movement, and the style. Give each tag once, and only for what can be seen. No "
            "quality tags such as 'masterpiece' or 'high quality', no sentence, no numbering, no full stop. "
            "Answer with the list alone, on one line."
        ),
    ),
    Preset(
        name="alt-text",
        summary="for people who don't see the picture, at most 125 characters",
        image=(
            "Write the alternative text of this image for somebody who uses a screen reader: what they need to "
            "know of it, in one or two short sentences of at most 125 characters together. The most important "
            "comes first. If the image has text that matters, give it word for word. Don't begin with 'Image of', "
            "'Picture of' or the like: a screen reader says that already. Don't interpret, praise or guess. "
            "Answer with the alternative text alone, without quotation marks."
        ),
        video=(
            "Write the alternative text of this video for somebody who uses a screen reader: what happens in it, "
            "in one or two short sentences of at most 125 characters together. The most important comes first. If "
            "the video has text that matters, give it word for word. Don't begin with 'Video of' or the like: a "
            "screen reader says that already. Don't interpret, praise or guess. Answer with the alternative text "
            "alone, without quotation marks."
        ),
    ),
    Preset(
        name="ocr",
        summary="the text that can be read",
        image=(
            "Write out all the text in this image, exactly as it stands: its own language, spelling, capitals, "
            "punctuation and mistakes. Go in reading order and keep the line breaks; leave an empty line between "
            "blocks that lie apart. Write tables row by row, with ' | ' between the columns. Put [unreadable] "
            "where a word can't be read. Don't translate, correct, complete or explain anything, and don't "
            "describe the image. If there is no text, answer with: [no text]"
        ),
        video=(
            "Write out all the text that can be read in this video, exactly as it stands: its own language, "
            "spelling, capitals, punctuation and mistakes. Go in the order in which it appears and write each "
            "text once, on a line of its own, however long it stays in view. Put [unreadable] where a word can't "
            "be read. Don't translate, correct, complete or explain anything, and don't describe the video. If "
            "there is no text, answer with: [no text]"
        ),
    ),
    Preset(
        name="events",
        summary="a video's events with their times",
        image=(
            "Say what is going on in this image, one event or action a line, the most important first. It is a "
            "still picture, so give no times. Each line is one plain sentence in the present tense that names who "
            "or what acts and what is done. Write only what can be seen, not what may have come before or may "
            "follow. If nothing happens, describe the scene in one line. No headings, no numbering, nothing "
            "before or after the lines."
        ),
        video=(
            "List the events in this video in order of time, one a line. Begin each line with the event's start "
            "and end as mm:ss-mm:ss, then one plain sentence in the present tense that says who or what acts, "
            "what is done, and what changes; for example: 00:03-00:07 A boy throws a ball to the left. Begin a "
            "new event when an action, a subject or the shot changes, not at fixed intervals, and cover the whole "
            "video. Write only what can be seen. Don't tell the same event twice. No headings, no numbering, "
            "nothing before or after the lines."
        ),
    ),
    Preset(
        name="plain",
        summary="whatever the model says by itself; the one that the bundled demo model understands",
        image="Describe the picture.",
        video="Describe the video.",
    ),
)

PRESETS = MappingProxyType({preset.name: preset for preset in _PRESETS})
"""By name, in the order in which help shows them."""
