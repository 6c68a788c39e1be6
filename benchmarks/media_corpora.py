"""Every file of a folder as this program opens it, beside libvips and FFmpeg: what is refused, and what differs.

    .venv/bin/python -m pip install -e '.[corpora]'
    python -m benchmarks.media_corpora ~/Pillow/Tests/images ~/sharp/test/fixtures --worst 20

For each file a child process opens it as captioning does (kind, plan, patches) and then as an upright picture in sRGB;
a clip's first frame stands for it. A file on which the child dies, hangs or raises anything but MediaError is a fault,
and makes the exit status 1. Pictures are compared with libvips (its colours by littlecms, transparency over white),
clips with the `ffmpeg` program, both made small enough that chroma upsampling doesn't count; the difference is the mean
of absolute differences of 8-bit values, and those over `--notable` are listed: they may be the oracle's fault as well,
as with a PNG's gamma, which libvips passes over. Memory is the child's most resident bytes in captioning,
beyond those at its start (Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen35mm.assets import demo_model_path
from qwen35mm_preprocess import MediaError, MediaLimits, MediaProcessor, detect_kind
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.video import first_frame

# What is compared is at most this large.
_COMPARED_SIDE = 256
_TIMEOUT_S = 120.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folders", nargs="+", type=Path)
    arguments.add_argument("--worst", type=int, default=10, help="how many of the most different files are listed")
    arguments.add_argument("--notable", type=float, default=8.0, help="a mean difference that is listed, of 255")
    arguments.add_argument("--max-pixels", type=int, default=MediaLimits().max_source_pixels)
    arguments.add_argument("--json", action="store_true")
    args = arguments.parse_args()
    rows = [_folder(folder, args) for folder in args.folders]
    if args.json:
        print(json.dumps(rows))
    if any(row["faults"] for row in rows):
        sys.exit(1)


def _folder(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    child, found = _Child(args.max_pixels), []
    for path in files:
        answer = child.ask(str(path))
        if answer is None:
            child, answer = _Child(args.max_pixels), {"fault": "died or hung"}
        found.append({"name": path.relative_to(folder).as_posix(), **answer})
    child.close()
    opened = [each for each in found if "seconds" in each and "refused" not in each and "fault" not in each]
    compared = [each for each in opened if each.get("difference") is not None]
    refused = Counter(each["refused"] for each in found if "refused" in each)
    faults = [each for each in found if "fault" in each]
    worst = sorted(compared, key=lambda each: -each["difference"])
    row = {
        "folder": folder.name,
        "files": len(files),
        "opened": len(opened),
        "refused": dict(refused.most_common()),
        "faults": faults,
        "seconds": sum(each.get("seconds", 0.0) for each in found),
        "peak_mib": max((each.get("peak_mib", 0.0) for each in found), default=0.0),
        "compared": len(compared),
        "different": sum(each["difference"] > args.notable for each in compared),
        "worst": [each for each in worst[: args.worst] if each["difference"] > args.notable],
    }
    if not args.json:
        _print(row, found)
    return row


def _print(row: dict[str, Any], found: list[dict[str, Any]]) -> None:
    print(
        f"{row['folder']}: {row['files']} files, {row['opened']} opened, {len(row['faults'])} faults; "
        f"{row['seconds']:.1f} s, {row['peak_mib']:.0f} MiB at most; {row['different']} of {row['compared']} differ"
    )
    for reason, count in row["refused"].items():
        example = next(each["name"] for each in found if each.get("refused") == reason)
        print(f"  {count:5} {reason}   ({example})")
    for each in (*row["faults"], *row["worst"]):
        print("   ", each.get("fault") or f"{each['difference']:6.1f}", each["name"])


class _Child:
    """A process that opens files, one after the other."""

    def __init__(self, max_pixels: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, max_pixels), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, path: str) -> dict[str, Any] | None:
        """What became of a file; None where the process didn't answer, and is gone."""
        try:
            self._pipe.send(path)
            if self._pipe.poll(_TIMEOUT_S):
                return self._pipe.recv()
        except (EOFError, OSError):
            pass
        self._process.kill()
        return None

    def close(self) -> None:
        self._process.kill()


def _serve(pipe: Connection, max_pixels: int) -> None:
    # Its own limits: what a corpus holds on purpose shall end this process, and not the machine.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    # Files are limited by what pixels may take, and so is what Pillow says of pictures by itself.
    limits = MediaLimits(max_image_bytes=max(64 << 20, 8 * max_pixels), max_source_pixels=max_pixels)
    processor = MediaProcessor.from_pretrained(demo_model_path(), limits=limits)
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while True:
        path = Path(pipe.recv())
        # The most resident bytes are counted anew.
        Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        answer: dict[str, Any] = {}
        picture = None
        try:
            kind = detect_kind(path, limits)
            processor.prepare(path, kind=kind)
            answer["peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib) / 1024
            picture = load_image(path, limits) if kind == "image" else first_frame(path, limits)
        except MediaError as error:
            answer["refused"] = f"{type(error).__name__}: {_reason(str(error), path)}"
        except Exception as error:
            answer["fault"] = f"{type(error).__name__}: {error}"
        answer["seconds"] = time.perf_counter() - began
        if picture is not None:
            with contextlib.suppress(Exception):
                oracle = _vips(path) if kind == "image" else _ffmpeg(path)
                answer["difference"] = _difference(picture, oracle)
        pipe.send(answer)


def _reason(message: str, path: Path) -> str:
    """An error's first sentence, without what differs from file to file."""
    return message.replace(f"'{path.name}'", "it").split(". ")[0][:100]


def _vips(path: Path) -> Image.Image:
    import pyvips  # pyright: ignore[reportMissingImports] - of this benchmark alone

    image: Any = pyvips.Image.new_from_file(str(path)).autorot()
    if image.get_typeof("icc-profile-data"):
        image = image.icc_transform("srgb")
    image = image.colourspace("srgb")
    if image.hasalpha():
        image = image.flatten(background=255)
    return Image.fromarray(image.cast("uchar").numpy()[..., :3].squeeze()).convert("RGB")


def _ffmpeg(path: Path) -> Image.Image:
    from imageio_ffmpeg import get_ffmpeg_exe  # pyright: ignore[reportMissingImports] - the same

    command = [get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-frames:v", "1", "-f", "image2pipe", "-c", "png", "-"]
    frame = Image.open(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", frame.size, "white"), frame).convert("RGB")


def _difference(ours: Image.Image, oracle: Image.Image) -> float:
    """The mean of absolute differences of 8-bit values; 255 where the sides' proportions are others."""
    if abs(np.log(ours.width / ours.height) - np.log(oracle.width / oracle.height)) > 0.05 + 2 / min(ours.size):
        return 255.0
    scale = min(1.0, _COMPARED_SIDE / max(ours.size))
    size = max(1, round(ours.width * scale)), max(1, round(ours.height * scale))
    small = [np.asarray(each.resize(size, Image.Resampling.BOX), np.float32) for each in (ours, oracle)]
    return float(np.abs(small[0] - small[1]).mean())


if __name__ == "__main__":
    main()
