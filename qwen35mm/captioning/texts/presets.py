"""Ready-made prompts, each with a wording for images and one for videos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.errors import CaptioningError

PRESETS: Mapping[str, Question] = MappingProxyType(
    {
        "short": Question(
            text=(
                "Write one sentence of at most 25 words that says what this image shows: the main subject, what it "
                "does, and where. Name only what can be seen. Don't begin with 'The image shows', 'A picture of' or "
                "the like; begin with the subject. Don't judge, guess or add a mood. Answer with the sentence alone."
            ),
            video_text=(
                "Write one sentence of at most 30 words that says what happens in this video: who or what acts, what "
                "it does from beginning to end, and where. Name only what can be seen. Don't begin with 'The video "
                "shows' or the like; begin with the subject. Don't judge, guess or add a mood. Answer with the "
                "sentence alone."
            ),
        ),
        "detailed": Question(
            text=(
                "Describe this image in one or two paragraphs, so that somebody could draw it from your words. Say "
                "what the main subjects are, how many, and what each looks like: colours, clothing, material, pose "
                "and expression. Say where each is in the image, what is in front and behind, the setting, the light, "
                "the camera's angle and distance, and the medium, such as photograph, drawing or render. Quote text "
                "that can be read, in its own language. Write plain sentences in the present tense. Don't begin with "
                "'The image shows' or the like. Leave out what can't be seen: names of people, intentions, moods, and "
                "what may lie outside the frame; don't say what is absent. No headings, no lists, no closing summary."
            ),
            video_text=(
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
        "tags": Question(
            text=(
                "List tags for this image: between 10 and 30, the most important first, separated by commas. Each is "
                "one to three words, in lower case, in the singular. Cover the subjects and how many there are, their "
                "colours, clothing and pose, actions, objects, the setting, the light, the camera's view, and the "
                "medium or style. Give each tag once, and only for what can be seen. No quality tags such as "
                "'masterpiece' or 'high quality', no sentence, no numbering, no full stop. Answer with the list "
                "alone, on one line."
            ),
            video_text=(
                "List tags for this video: between 10 and 30, the most important first, separated by commas. Each is "
                "one to three words, in lower case, in the singular. Cover the subjects and how many there are, their "
                "colours and clothing, actions and directions of movement, objects, the setting, the light, the "
                "camera's view and movement, and the style. Give each tag once, and only for what can be seen. No "
                "quality tags such as 'masterpiece' or 'high quality', no sentence, no numbering, no full stop. "
                "Answer with the list alone, on one line."
            ),
        ),
        "alt-text": Question(
            text=(
                "Write the alternative text of this image for somebody who uses a screen reader: what they need to "
                "know of it, in one or two short sentences of at most 125 characters together. The most important "
                "comes first. If the image has text that matters, give it word for word. Don't begin with 'Image of', "
                "'Picture of' or the like: a screen reader says that already. Don't interpret, praise or guess. "
                "Answer with the alternative text alone, without quotation marks."
            ),
            video_text=(
                "Write the alternative text of this video for somebody who uses a screen reader: what happens in it, "
                "in one or two short sentences of at most 125 characters together. The most important comes first. If "
                "the video has text that matters, give it word for word. Don't begin with 'Video of' or the like: a "
                "screen reader says that already. Don't interpret, praise or guess. Answer with the alternative text "
                "alone, without quotation marks."
            ),
        ),
        "ocr": Question(
            text=(
                "Write out all the text in this image, exactly as it stands: its own language, spelling, capitals, "
                "punctuation and mistakes. Go in reading order and keep the line breaks; leave an empty line between "
                "blocks that lie apart. Write tables row by row, with ' | ' between the columns. Put [unreadable] "
                "where a word can't be read. Don't translate, correct, complete or explain anything, and don't "
                "describe the image. If there is no text, answer with: [no text]"
            ),
            video_text=(
                "Write out all the text that can be read in this video, exactly as it stands: its own language, "
                "spelling, capitals, punctuation and mistakes. Go in the order in which it appears and write each "
                "text once, on a line of its own, however long it stays in view. Put [unreadable] where a word can't "
                "be read. Don't translate, correct, complete or explain anything, and don't describe the video. If "
                "there is no text, answer with: [no text]"
            ),
            verbatim=True,
            lines=True,
        ),
        "events": Question(
            lines=True,
            text=(
                "Say what is going on in this image, one event or action a line, the most important first. It is a "
                "still picture, so give no times. Each line is one plain sentence in the present tense that names who "
                "or what acts and what is done. Write only what can be seen, not what may have come before or may "
                "follow. If nothing happens, describe the scene in one line. No headings, no numbering, nothing "
                "before or after the lines."
            ),
            video_text=(
                "List the events in this video in order of time, one a line. Begin each line with the event's start "
                "and end as mm:ss-mm:ss, then one plain sentence in the present tense that says who or what acts, "
                "what is done, and what changes; for example: 00:03-00:07 A boy throws a ball to the left. Begin a "
                "new event when an action, a subject or the shot changes, not at fixed intervals, and cover the whole "
                "video. Write only what can be seen. Don't tell the same event twice. No headings, no numbering, "
                "nothing before or after the lines."
            ),
        ),
        "plain": Question(
            text="Describe the picture.",
            video_text="Describe the video.",
        ),
    }
)
"""By name, in the order of the help text."""


def preset_question(name: str, weight: float = 1.0) -> Question:
    """A preset, with its weight relative to a run's other questions.

    Raises:
        CaptioningError: there is no such preset.
    """
    if name not in PRESETS:
        raise CaptioningError(f"There is no preset {name!r}. There are: {', '.join(PRESETS)}.")
    return replace(PRESETS[name], weight=weight)
