"""JPEG XL: reads the size from the header before decoding, and decodes with libjxl from the package pillow_jxl.

That package's own Pillow plugin decodes a file on opening, on all cores, whatever its size.
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any

from PIL import Image, ImageFile

from qwen35mm_preprocess.rgb import SWAP_SIDES, UPRIGHT
from qwen35mm_preprocess.types import Size

# The longest marker, both sides, orientation and intrinsic size.
_HEADER_BYTES = 20
# Bits of a side, by a 2-bit selector; width to height, by a 3-bit selector (ISO/IEC 18181-1, D.2 and D.3).
_SIDE_BITS = (9, 13, 18, 30)
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


class JpegXlFile(ImageFile.ImageFile):
    """An opened file. `size` is upright; `mode` and the profile in `info` are known after loading.

    Raises:
        SyntaxError: the header is missing, cut off or an animation's.
    """

    format = "JXL"

    def _open(self) -> None:
        assert self.fp is not None
        (height, width), self._turn = _header(self.fp)
        swaps = self._turn in SWAP_SIDES
        self._size, self._mode = (height, width) if swaps else (width, height), "RGB"

    def load(self) -> Any:
        """Decodes in this thread. Raises RuntimeError or OSError if the file is damaged."""
        if self._im is None:
            import pillow_jxl

            assert self.fp is not None
            self.fp.seek(0)
            is_jpeg, found, data, icc, _ = pillow_jxl.Decoder(num_threads=1)(self.fp.read())
            if is_jpeg:
                # The original JPEG, in its stored orientation.
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
    """The stored (height, width), and the operation that turns it upright."""
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
    # One bit says that all metadata is default. If not, the next bit says whether there is an orientation, an intrinsic
    # size, a preview or an animation.
    if take(1) or not take(1):
        return size, None
    turn = UPRIGHT.get(take(3) + 1)
    if take(1):
        sides()
    if take(1) or take(1):
        raise SyntaxError("animated, of which the package gives the last frame, or with a preview")
    return size, turn


def _codestream(file: IO[bytes]) -> bytes:
    """The codestream's first bytes, from the bare file or from its boxes."""
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
            # Size 0 means the last box, up to the file's end.
            part = file.read(_HEADER_BYTES if size == 0 else max(0, min(rest, _HEADER_BYTES)))
            found += part
            rest -= len(part)
        if size == 0 or rest < 0:
            break
        file.seek(rest, io.SEEK_CUR)
    return found
