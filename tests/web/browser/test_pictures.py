"""Pictures whose file says how they are shown: ours are those that Chromium shows."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser

from qwen35mm_preprocess.formats import HAS_AVIF
from qwen35mm_preprocess.image import load_image
from tests.preprocess.media_files import LIMITS, clap, encode_image, scene, with_property

_DRAWN = """async (address) => {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/png");
}"""


@pytest.mark.skipif(not HAS_AVIF, reason="Pillow has no AVIF here")
def test_an_avif_is_turned_and_cut_as_chromium_does(browser: Browser) -> None:
    whole = encode_image(Image.fromarray(scene(3, (64, 96))), "AVIF", quality=90, subsampling="4:4:4")
    part = clap((0, 0, 48, 40), (96, 64))
    page = browser.new_page()
    try:
        for properties in ([], [b"irot\1"], [b"irot\2"], [b"imir\0"], [b"imir\1"], [b"irot\3", b"imir\1"], [part]):
            data = whole
            for content in properties:
                data = with_property(data, content)
            drawn = page.evaluate(_DRAWN, "data:image/avif;base64," + base64.b64encode(data).decode())
            theirs = Image.open(io.BytesIO(base64.b64decode(drawn.partition(",")[2]))).convert("RGB")
            ours = load_image(data, LIMITS)
            assert ours.size == theirs.size, properties
            assert np.abs(np.asarray(ours, int) - np.asarray(theirs)).max() <= 3, properties
    finally:
        page.close()
