"""SVG drawings as pictures: recognises them, and draws them as PNG.

A drawing is untrusted. It is drawn where media are decoded, in a process with limits on memory and time. It loads
nothing: references to anything but itself and data URIs are removed before resvg, which reads local files, sees it.
"""

from __future__ import annotations

import codecs
import functools
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from qwen35mm.chat.documents.encodings import decode
from qwen35mm_preprocess import MediaDecodeError, MediaLimits
from qwen35mm_preprocess.media import check_num_bytes, describe
from qwen35mm_preprocess.say import say

# Bounds of the longer side in pixels: an icon is enlarged, a poster reduced.
LEAST_SIDE, MOST_SIDE = 512, 2048

_SVG = "http://www.w3.org/2000/svg"
_HEAD_BYTES = 1 << 16
# What may stand before the root element.
_BEFORE = (("<?", "?>"), ("<!--", "-->"), ("<!DOCTYPE", ">"))
_ROOT = re.compile(r"<(?:[\w-]+:)?svg[\s/>]")
_EMBEDDED = re.compile(r"#|data:image/[\w.+-]+(;[\w=.+-]*)*,", re.IGNORECASE)
_LENGTH = re.compile(r"\s*\+?(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(px|pt|pc|mm|cm|in|)\s*")
_PIXELS = {"": 1, "px": 1, "pt": 96 / 72, "pc": 16, "mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96}
# Usual fonts of each generic family, by resvg's options. It leaves out words in a font that isn't installed.
_SANS = ("Liberation Sans", "Arial", "Helvetica", "DejaVu Sans", "Noto Sans", "Segoe UI")
_FAMILIES = {
    "serif_family": ("Liberation Serif", "Times New Roman", "Times", "DejaVu Serif", "Noto Serif", *_SANS),
    "sans_serif_family": _SANS,
    "monospace_family": ("Liberation Mono", "Courier New", "Menlo", "DejaVu Sans Mono", "Noto Sans Mono", *_SANS),
}
# A browser's size for a drawing that has none.
_WIDTH, _HEIGHT = 300.0, 150.0


def is_svg(path: Path) -> bool:
    """Whether a text file's root element is an SVG drawing's. Raises OSError."""
    with path.open("rb") as file:
        found = decode(file.read(_HEAD_BYTES), final=False)
    text = "" if found is None else found[0].lstrip()
    while before := next((each for each in _BEFORE if text.startswith(each[0])), None):
        opening, closing = before
        if opening == "<!DOCTYPE" and "[" in text.partition(">")[0]:
            closing = "]>"
        text = text.partition(closing)[2].lstrip()
    return _ROOT.match(text) is not None


def svg_as_png(path: Path, limits: MediaLimits) -> bytes:
    """A drawing on white, as PNG.

    Raises:
        MediaLimitError: the file is too large.
        MediaDecodeError: it can't be drawn.
    """
    import resvg_py

    check_num_bytes(path.stat().st_size, limits.max_image_bytes, path)
    damaged = MediaDecodeError(say("{name} can't be drawn: it is damaged, or empty.", name=describe(path)))
    try:
        root = ElementTree.fromstring(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        _make_safe(root)
        _set_size(root)
        text = ElementTree.tostring(root, "unicode")
    except (ElementTree.ParseError, ValueError, ArithmeticError, LookupError, RecursionError):
        raise damaged from None
    families = _families() if root.find(f".//{{{_SVG}}}text") is not None else {}
    if None in families.values():
        raise MediaDecodeError(say("{name} can't be drawn: its words need a font.", name=describe(path)))
    try:
        return bytes(resvg_py.svg_to_bytes(text, background="white", **families))
    except ValueError:
        raise damaged from None


@functools.cache
def _families() -> dict[str, Any]:
    """An installed font for each generic family; None if there is none."""
    return {option: next(filter(_is_installed, names), None) for option, names in _FAMILIES.items()}


def _is_installed(family: str) -> bool:
    import resvg_py

    empty, word = (f'<svg xmlns="{_SVG}" width="9" height="9"><text y="9">{text}</text></svg>' for text in ("", "E"))
    return resvg_py.svg_to_bytes(word, serif_family=family) != resvg_py.svg_to_bytes(empty)


def _make_safe(root: ElementTree.Element) -> None:
    """Removes references to the outside, and gives elements without a namespace SVG's."""
    for element in root.iter():
        if not element.tag.startswith("{"):
            element.tag = f"{{{_SVG}}}{element.tag}"
        for name in list(element.attrib):
            if name.rpartition("}")[2] in ("href", "src") and not _EMBEDDED.match(element.attrib[name].strip()):
                del element.attrib[name]


def _set_size(root: ElementTree.Element) -> None:
    """Sets the root's size in pixels. Raises ValueError."""
    box = [float(each) for each in re.split(r"[\s,]+", root.get("viewBox", "").strip()) if each]
    width, height = _length(root.get("width")), _length(root.get("height"))
    if len(box) == 4 and min(box[2:]) > 0 and all(map(math.isfinite, box)):
        ratio = box[2] / box[3]
        if width is None:
            width = box[2] if height is None else height * ratio
        height = width / ratio if height is None else height
    else:
        width, height = width or _WIDTH, height or _HEIGHT
        root.set("viewBox", f"0 0 {width} {height}")
    longer = max(width, height)
    scale = min(max(longer, LEAST_SIDE), MOST_SIDE) / longer
    root.set("width", str(max(round(width * scale), 1)))
    root.set("height", str(max(round(height * scale), 1)))


def _length(text: str | None) -> float | None:
    """A length in pixels; None if it is missing, zero or relative."""
    found = _LENGTH.fullmatch(text or "")
    return float(found[1]) * _PIXELS[found[2]] or None if found else None
