"""SVG drawings: what is recognised, how large they are drawn, and that a hostile one loads and breaks nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from qwen35mm.assets import demo_model_path
from qwen35mm.chat.documents.svg import LEAST_SIDE, MOST_SIDE, is_svg, svg_as_png
from qwen35mm.decoding import Decoders, DecodingProcessor
from qwen35mm.decoding.processor import picture_by
from qwen35mm_preprocess import MediaDecodeError, MediaError, MediaLimitError, MediaLimits, MediaProcessor

XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
RED, WHITE = (255, 0, 0), (255, 255, 255)


def svg(content: str, attributes: str = 'width="600" height="600"', before: str = "") -> str:
    return f"{before}<svg {XMLNS} {attributes}>{content}</svg>"


def put(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.svg"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def drawn(folder: Path, text: str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(svg_as_png(put(folder, text), MediaLimits()))).convert("RGB")


DOCTYPE = '<!DOCTYPE svg PUBLIC "a" "b" [\n<!ENTITY ns "http://a.b/">\n]>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (svg(""), True),
        (svg("", before='\ufeff<?xml version="1.0"?>\n<!-- <html> -->\n' + DOCTYPE), True),
        (svg("").encode("utf-16"), True),
        ("<svg:svg xmlns:svg='http://www.w3.org/2000/svg'/>", True),
        ("<svg>", True),
        ("<svgs>", False),
        ("<html><svg></svg></html>", False),
        ("An <svg> in words", False),
        ("<?xml", False),
        ("<!-- <svg>", False),
        ("", False),
    ],
)
def test_a_drawing_is_recognised_by_its_root(tmp_path: Path, text: str | bytes, expected: bool) -> None:
    assert is_svg(put(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ('width="600" height="900"', (600, 900)),
        ('width="24" height="12"', (LEAST_SIDE, LEAST_SIDE // 2)),
        ('width="1e4" viewBox="0 0 2 1"', (LEAST_SIDE, LEAST_SIDE // 2)),
        ('width="100000" height="50000px"', (MOST_SIDE, MOST_SIDE // 2)),
        ('width="10in" height="254mm"', (960, 960)),
        ('width="100%" height="100%" viewBox="-5 -5 800 400"', (800, 400)),
        ('height="600" viewBox="0,0,1,2"', (300, 600)),
        ('width="0" height="-5"', (LEAST_SIDE, LEAST_SIDE // 2)),
        ('viewBox="0 0 nan 5"', (LEAST_SIDE, LEAST_SIDE // 2)),
        ('viewBox="0 0 1e30 1"', (MOST_SIDE, 1)),
    ],
)
def test_the_size_follows_the_drawing_s_within_bounds(tmp_path: Path, attributes: str, size: tuple[int, int]) -> None:
    picture = drawn(tmp_path, svg('<rect width="100%" height="100%" fill="red" x="-5" y="-5"/>', attributes))
    assert picture.size == size


def test_a_drawing_is_drawn_on_white_with_its_words_and_embedded_pictures(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(data, "PNG")
    embedded = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    picture = drawn(tmp_path, svg(f'<image xlink:href="{embedded}" width="300" height="600"/>'))
    assert (picture.getpixel((150, 300)), picture.getpixel((450, 300))) == (RED, WHITE)
    word = drawn(tmp_path, svg('<text x="9" y="300" font-size="200" font-family="Nonesuch, sans-serif">Word</text>'))
    assert word.getextrema()[0] == (0, 255)
    # Without a namespace, and with a reference to itself.
    text = '<svg width="600" height="600"><defs><rect id="a" width="600" height="600" fill="red"/></defs>'
    assert drawn(tmp_path, f'{text}<use href="#a"/></svg>').getpixel((5, 5)) == RED


@pytest.mark.parametrize(
    "content",
    [
        '<image href="{path}" width="600" height="600"/>',
        '<image href=" {path}" width="600" height="600"/>',
        '<image xlink:href="{path}" width="600" height="600"/>',
        '<image href="&path;" width="600" height="600"/>',
        '<image href="file://{path}" width="600" height="600"/>',
        '<image href="data:/../..{path}" width="600" height="600"/>',
        '<image href="{name}" width="600" height="600"/>',
        '<filter id="f"><feImage href="{path}"/></filter><rect width="600" height="600" filter="url(#f)"/>',
        '<image href="{nested}" width="600" height="600"/>',
        '<style>@import "{path}"; rect {{ fill: url({path}) }}</style><rect width="600" height="600"/>',
        '<image href="http://127.0.0.1:9/a.png" width="600" height="600"/>',
    ],
)
def test_nothing_from_outside_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "secret.png"
    Image.new("RGB", (4, 4), "red").save(path)
    inner = svg(f'<image href="{path}" width="600" height="600"/>')
    nested = f"data:image/svg+xml;base64,{base64.b64encode(inner.encode()).decode()}"
    before = f'<!DOCTYPE svg [<!ENTITY path "{path}">]>'
    picture = drawn(tmp_path, svg(content.format(path=path, name=path.name, nested=nested), before=before))
    assert RED not in {color for _, color in picture.getcolors(1 << 20) or ()}


ENTITIES = "".join('<!ENTITY a{} "{}">'.format(level, f"&a{level - 1};" * 10) for level in range(1, 10))
USES = "".join('<g id="u{}">{}</g>'.format(level, f'<use href="#u{level - 1}"/>' * 10) for level in range(1, 10))


@pytest.mark.parametrize(
    "text",
    [
        svg("<text>&a9;</text>", before=f'<!DOCTYPE svg [<!ENTITY a0 "a">{ENTITIES}]>'),
        svg("<text>&a;</text>", before='<!DOCTYPE svg [<!ENTITY a "&a;">]>'),
        svg("<text>&a;</text>", before='<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]>'),
        svg("<g>" * 1000),
        "<svg",
        f"<svg {XMLNS} viewBox='a b'/>",
        f"<svg {XMLNS} viewBox='0 0 1e-308 1e308'/>",
        svg("").encode("utf-16")[:-8],
        svg("", before='<?xml version="1.0" encoding="nonesuch"?>'),
    ],
)
def test_what_can_not_be_drawn_is_said(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(MediaDecodeError, match=r"'a\.svg' can't be drawn"):
        svg_as_png(put(tmp_path, text), MediaLimits())


def test_words_are_not_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.chat.documents.svg._families", lambda: {"serif_family": None})
    assert drawn(tmp_path, svg("")).size == (600, 600)
    with pytest.raises(MediaDecodeError, match="its words need a font"):
        svg_as_png(put(tmp_path, svg("<text>a</text>")), MediaLimits())


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(MediaLimitError, match="MiB"):
        svg_as_png(put(tmp_path, svg("")), MediaLimits(max_image_bytes=10))


@pytest.fixture(scope="module")
def media() -> Iterator[DecodingProcessor]:
    with closing(Decoders(timeout_s=3)) as decoders:
        yield DecodingProcessor.of(MediaProcessor.from_pretrained(demo_model_path()), decoders)


@pytest.mark.parametrize(
    "content",
    [
        f'<g id="u0"><rect width="1" height="1"/></g>{USES}<use href="#u9"/>',
        "<g>" * 20_000 + "</g>" * 20_000,
    ],
    ids=["uses", "depth"],
)
def test_one_that_never_ends_or_breaks_the_library_is_its_own_fault(
    media: DecodingProcessor, tmp_path: Path, content: str
) -> None:
    with pytest.raises(MediaError):
        picture_by(media, put(tmp_path, svg(content)), svg_as_png, media.limits)
    assert picture_by(media, put(tmp_path, svg("")), svg_as_png, media.limits)
