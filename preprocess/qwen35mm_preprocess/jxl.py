"""JPEG XL: sizes from the header, before anything is decoded; pixels by libjxl, in the package pillow_jxl.

That package's own plugin of Pillow's decodes a file as it opens it, on all cores, whatever its size.
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any

from PIL import Image, ImageFile

from qwen35mm_preprocess.rgb import SWAP_SIDES, UPRIGHT
from qwen35mm_preprocess.types import Size

# Its marker, both sides, how it is turned and what it is shown at, at their longest.
_HEADER_BYTES = 20
# Of a side, by the two bits before it, and width to height, by three bits (ISO/IEC 18181-1, D.2 and D.3).
_SIDE_BITS = (9, 13, 18, 30)
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


class JpegXlFile(ImageFile.ImageFile):
    """An opened file: `size` is upright; `mode` and the profile in `info` are known once it is loaded.

    Raises:
        SyntaxError: there is no header, it breaks off, or it is that of an animation.
    """

    format = "JXL"

    def _open(self) -> None:
        assert self.fp is not None
        (height, width), self._turn = _header(self.fp)
        swaps = self._turn in SWAP_SIDES
        self._size, self._mode = (height, width) if swaps else (width, height), "RGB"

    def load(self) -> Any:
        """Decodes in this thread. Raises RuntimeError or OSError for damage."""
        if self._im is None:
            import pillow_jxl

            assert self.fp is not None
            self.fp.seek(0)
            is_jpeg, found, data, icc, _ = pillow_jxl.Decoder(num_threads=1)(self.fp.read())
            if is_jpeg:
                # The file that it was made of, as that was stored.
                picture = Image.open(io.BytesIO(data), formats=("JPEG",))
                icc = picture.info.get("icc_profile", icc)
            else:
                picture = Image.frombytes(found.mode, (found.width, found.height), data)
            if is_jpeg and self._turn is not None:
                picture = picture.transpose(self._turn)
            picture.load()
            if picture.size != self.size:
                raise OSError(f"{self.size} in the header, {picture.size} decoded")
            self._mode, self.im = picture.mode, picture.im
            if icc:
                self.info["icc_profile"] = icc
        return super().load()


def _header(file: IO[bytes]) -> tuple[Size, Image.Transpose | None]:
    """(height, width) as stored, and what puts it upright."""
    start = _codestream(file)
    if len(start) < 3 or start[:2] != b"\xff\n":
        raise SyntaxError("no JPEG XL")
    bits, num_bits = int.from_bytes(start[2:], "little"), 8 * (len(start) - 2)

    def take(count: int) -> int:
        nonlocal bits, num_bits
        if count > num_bits:
            raise SyntaxError("the header breaks off")
        taken, bits, num_bits = bits & (1 << count) - 1, bits >> count, num_bits - count
        return taken

    def sides() -> Size:
        is_small = take(1)

        def side() -> int:
            return (take(5) + 1) * 8 if is_small else take(_SIDE_BITS[take(2)]) + 1

        height, ratio = side(), take(3)
        return height, height * _RATIOS[ratio - 1][0] // _RATIOS[ratio - 1][1] if ratio else side()

    size = sides()
    # A picture that is as most are says so in one bit; in one that isn't, a second says that it is turned, is meant to
    # be shown at another size, has a preview before it, or is animated.
    if take(1) or not take(1):
        return size, None
    turn = UPRIGHT.get(take(3) + 1)
    if take(1):
        sides()
    if take(1) or take(1):
        raise SyntaxError("animated, of which the package gives the last frame, or with a preview")
    return size, turn


def _codestream(file: IO[bytes]) -> bytes:
    """Its first bytes: of the file, or of the boxes that hold it."""
    head = file.read(_HEADER_BYTES)
    if head[:2] == b"\xff\n":
        return head
    file.seek(0)
    found = b""
    while len(found) < _HEADER_BYTES and len(head := file.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        rest = struct.unpack(">Q", file.read(8))[0] - 16 if size == 1 else size - 8
        if name == b"jxlp":
            file.seek(4, io.SEEK_CUR)
            rest -= 4
        if name in (b"jxlc", b"jxlp"):
            # No size is the last box's, up to the file's end.
            part = file.read(_HEADER_BYTES if size == 0 else max(0, min(rest, _HEADER_BYTES)))
            found += part
            rest -= len(part)
        if size == 0 or rest < 0:
            break
        file.seek(rest, io.SEEK_CUR)
    return found
