"""Cuts parts of a video out without encoding: packets are copied, from a key frame on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import av
from av.audio.stream import AudioStream
from av.error import FFmpegError
from av.packet import Packet

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.records import printable
from qwen35mm.decoding import Answer
from qwen35mm.decoding.answers import Data, require
from qwen35mm_preprocess import MediaFormatError, MediaLimits
from qwen35mm_preprocess.formats import MATROSKA, MP4, MPEG_TS
from qwen35mm_preprocess.video_container import OpenVideo, open_video, packets_of
from qwen35mm_preprocess.video_probe import VideoInfo, probe_video

# The container that a clip is written in: its source's.
_WRITERS = {MP4: "mp4", MATROSKA: "matroska", MPEG_TS: "mpegts"}
# Frames begin within a millisecond of the times that are stored.
_EXACT_S = 1e-3
_CONVERT = "Convert it to MP4 or Matroska."


def cut_out(item: Item, part: Part, limits: MediaLimits) -> Answer:
    """The part as a file, for `read_clip`: from its first key frame to its end, or a few frames before.

    Nothing for a part without a key frame, from which decoding can start.

    Frames are never reordered across the part's end: a frame that needs one behind it is left out with those that
    follow it in the file.

    Raises:
        MediaError: the video can't be read, or no clip can be written in its format.
    """
    source, name = item.read(), printable(item.name)
    info = probe_video(source, limits)
    frames = info.within(part.start_s, part.end_s - 2 * _EXACT_S)
    first = next((frame for frame in frames if info.is_key[frame]), None)
    if info.is_animation or first is None:
        return Answer()
    end = int(info.pts[frames.stop]) if frames.stop < info.num_frames else None
    with open_video(source, limits) as video:
        writer = _WRITERS.get(video.format)
        if writer is None:
            raise MediaFormatError(
                f"No clip can be cut out of '{name}': {video.format.name} isn't written here. {_CONVERT}"
            )
        try:
            data, last = _copied(video, info, first, end, writer)
        except (FFmpegError, ValueError) as error:
            raise MediaFormatError(f"No clip can be cut out of '{name}': {error}. {_CONVERT}") from error
    stop = int(info.pts.searchsorted(last)) + 1
    end_s = float(info.times_s[stop]) if stop < info.num_frames else info.duration_s
    return Answer([round(float(info.times_s[first]), 3), round(end_s, 3)], (data,))


def read_clip(values: Any, data: Data, most_bytes: int) -> tuple[float, float, bytes] | None:
    """Start and end in seconds, and the file, of the answer of `cut_out`; None for nothing. Raises NonsenseError."""
    if values is None:
        return None
    start_s, end_s = values
    require(type(start_s) is float and type(end_s) is float and 0 <= start_s <= end_s, "no range")
    return start_s, end_s, data.take(most_bytes)


def _copied(video: OpenVideo, info: VideoInfo, first: int, end: int | None, writer: str) -> tuple[memoryview, int]:
    """A file with the packets from a key frame on, and the presentation time of its last frame."""
    begin = int(info.pts[first])
    if info.can_seek:
        video.container.seek(begin, stream=video.stream)
    packets = _packets(video, begin, end)
    last = max(packet.pts for packet in packets if packet.pts is not None)
    sound = _sound(video, begin, end) if info.can_seek else None
    try:
        return _muxed(video, begin, packets, sound, writer), last
    except (FFmpegError, ValueError):
        if sound is None:
            raise
    # A few codecs of sound can't be written by libav: those clips are silent.
    return _muxed(video, begin, _packets_again(video, begin, end), None, writer), last


def _muxed(
    video: OpenVideo, begin: int, packets: Sequence[Packet], sound: tuple[AudioStream, Sequence[Packet]] | None, to: str
) -> memoryview:
    """A file of packets, with times from the first picture on."""
    file = io.BytesIO()
    with av.open(file, "w", format=to, options={"fflags": "+bitexact"}) as target:
        tracks = [(target.add_stream_from_template(video.stream), packets, begin)]
        if sound is not None:
            stream, heard = sound
            # In the sound's own time base.
            start = round(begin * (video.stream.time_base or 0) / (stream.time_base or 1))
            tracks.append((target.add_stream_from_template(stream), heard, start))
        for stream, own, start in tracks:
            for packet in own:
                assert packet.dts is not None
                packet.pts = None if packet.pts is None else packet.pts - start
                packet.dts -= start
                packet.stream = stream
                target.mux(packet)
    return file.getbuffer()


def _packets_again(video: OpenVideo, begin: int, end: int | None) -> Sequence[Packet]:
    video.container.seek(begin, stream=video.stream)
    return _packets(video, begin, end)


def _sound(video: OpenVideo, begin: int, end: int | None) -> tuple[AudioStream, Sequence[Packet]] | None:
    """The first sound track and its packets that begin within the pictures' times; None if there is none."""
    if not video.container.streams.audio:
        return None
    stream, base = video.container.streams.audio[0], video.stream.time_base or 0
    video.container.seek(begin, stream=video.stream)
    heard: list[Packet] = []
    for packet in video.container.demux(stream):
        if packet.size == 0 or packet.dts is None or packet.pts is None:
            continue
        begins = packet.pts * (stream.time_base or 0)
        if end is not None and begins >= end * base:
            break
        if begins >= begin * base:
            heard.append(packet)
    return (stream, heard) if heard else None


def _packets(video: OpenVideo, begin: int, end: int | None) -> Sequence[Packet]:
    """The packets from the key frame at `begin` on, up to the first that is shown at `end` or later."""
    found: list[Packet] = []
    for packet in packets_of(video):
        if packet.size == 0:
            continue
        if not found and (packet.pts != begin or not packet.is_keyframe):
            continue
        if packet.pts is not None and end is not None and packet.pts >= end:
            break
        # Frames that are shown before the key frame belong to the part before it.
        if packet.pts is None or packet.pts >= begin:
            found.append(packet)
    # Matroska stores no decoding times, and libav can't tell those before it knows the delay.
    following: int | None = None
    for packet in reversed(found):
        if packet.dts is None:
            packet.dts = begin if following is None else following - max(packet.duration or 0, 1)
        following = packet.dts
    return found
