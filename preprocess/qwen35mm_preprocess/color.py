"""Converts pictures to sRGB, as a viewer shows them.

ICC profiles                    littlecms, by the perceptual table where there is one, without black point
                                compensation, as in Chromium; a profile equivalent to sRGB changes nothing
PNG: cICP, else iCCP, else      the specification's order (PNG 3rd edition, 11.3.2); a gamma within 5% of 1 / 2.2
sRGB, else gAMA and cHRM        and sRGB's primaries change nothing, as in libpng
CMYK without a profile          (1 - C)(1 - K), as in browsers
PQ and HLG (BT.2100)            BT.2390's curve from 1,000 cd/m2 down to a white of 203 (BT.2408)
other primaries                 a matrix in linear light; colours outside sRGB are clipped
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageCms

# A profile counts as sRGB if no colour differs by more than this (of 255).
_SAME_COLORS = 2
_ICC_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK", "LAB": "Lab"}
# Tags that littlecms prefers to the perceptual table A2B0 when the intent is relative colorimetric.
_ICC_RIVALS = {b"A2B1", b"D2B1"}
# libpng's threshold for equal gammas.
_SAME_GAMMA = 0.05
_SAME_PRIMARIES = 0.005
# In cd/m2: diffuse white in HDR pictures (BT.2408), and the peak that most are made for.
_WHITE, _PEAK = 203.0, 1000.0
_PIXELS_AT_ONCE = 1 << 18
# The property boxes lie before the picture data, usually in the first few hundred bytes.
_AVIF_HEAD_BYTES = 1 << 16

# x and y of red, green, blue and white.
Chromaticities = tuple[tuple[float, float], tuple[float, float], tuple[float, float], tuple[float, float]]
_D65 = (0.3127, 0.3290)
_SRGB: Chromaticities = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06), _D65)
# Keys are code points of ITU-T H.273, as used by video, AVIF and PNG.
PRIMARIES: dict[int, Chromaticities] = {
    1: _SRGB,
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    11: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), (0.314, 0.351)),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
}
PQ, HLG = 16, 18
_LINEAR = 8


class Encoding(NamedTuple):
    """The encoding of colours without a profile.

    Attributes:
        transfer: maps values from 0 to 1 to linear light, where 1 is diffuse white.
        primaries: chromaticities of red, green, blue and white.
        is_hdr: whether light can be brighter than white.
    """

    transfer: Callable[[np.ndarray], np.ndarray]
    primaries: Chromaticities
    is_hdr: bool = False

    @classmethod
    def of_code_points(cls, primaries: int, transfer: int) -> Encoding | None:
        """The encoding for ITU-T H.273's code points; None for sRGB and what viewers treat as sRGB."""
        chromaticities = PRIMARIES.get(primaries, _SRGB)
        if transfer in (PQ, HLG):
            return cls(_pq_light if transfer == PQ else _hlg_light, chromaticities, is_hdr=True)
        if transfer == _LINEAR:
            return cls(_same_light, chromaticities)
        return None if chromaticities is _SRGB else cls(_srgb_light, chromaticities)


def to_srgb(image: Image.Image, info: Mapping[Any, Any], code_points: tuple[int, int] | None = None) -> Image.Image:
    """Converts a decoded picture of mode L, RGB, CMYK or LAB to sRGB in mode RGB.

    Args:
        info: Pillow's `info` of the file.
        code_points: primaries and transfer by ITU-T H.273, which override everything else.
    """
    found = _conversion(image.mode, info, code_points)
    if isinstance(found, Encoding):
        return Image.fromarray(convert(np.asarray(image.convert("RGB")), found))
    if found is None:
        return image.convert("RGB")
    converted = ImageCms.applyTransform(image, found)
    assert converted is not None, "it is None only where a picture is converted in place"
    return converted


def is_srgb(mode: str, info: Mapping[Any, Any], code_points: tuple[int, int] | None = None) -> bool:
    """Whether `to_srgb` leaves the colours unchanged."""
    return _conversion(mode, info, code_points) is None


def _conversion(
    mode: str, info: Mapping[Any, Any], code_points: tuple[int, int] | None
) -> Encoding | ImageCms.ImageCmsTransform | None:
    if code_points is not None:
        return Encoding.of_code_points(*code_points)
    icc = info.get("icc_profile")
    found = _icc_transform(icc, mode) if isinstance(icc, bytes) and mode in _ICC_SPACES else _numbers_encoding(info)
    return _lab_transform() if found is None and mode == "LAB" else found


def convert(values: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Converts encoded values [H, W, 3] uint8 or uint16 to sRGB uint8 [H, W, 3], a few rows at a time."""
    height, width, _ = values.shape
    levels = np.iinfo(values.dtype).max
    table = encoding.transfer(np.arange(levels + 1, dtype=np.float64) / levels).astype(np.float32)
    matrix = _between(encoding.primaries, _SRGB).astype(np.float32).T
    out = np.empty((height, width, 3), np.uint8)
    rows = max(1, _PIXELS_AT_ONCE // width)
    for start in range(0, height, rows):
        part = slice(start, start + rows)
        light = table[values[part]]
        if encoding.is_hdr:
            peak = light.max(axis=-1, keepdims=True)
            light = light * (_toned(peak) / np.maximum(peak, 1e-6))
        out[part] = _encode(light @ matrix)
    return out


@functools.lru_cache(maxsize=1)
def _lab_transform() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")


@functools.lru_cache(maxsize=16)
def _icc_transform(icc: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """None if the profile is damaged, is for another mode or is equivalent to sRGB."""
    try:
        profile: Any = ImageCms.ImageCmsProfile(io.BytesIO(_only_perceptual(icc)))
        if profile.profile.xcolor_space.strip() != _ICC_SPACES[mode]:
            return None
        target = ImageCms.createProfile("sRGB")
        # For the perceptual intent, littlecms makes the darkest colour of a v4 profile black.
        transform = ImageCms.buildTransform(profile, target, mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    if mode in ("CMYK", "LAB"):
        return transform
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    probe = np.arange(256, dtype=np.uint8)[None] if mode == "L" else _cube(steps)
    expected = np.repeat(probe[..., None], 3, axis=-1) if mode == "L" else probe
    found = np.asarray(ImageCms.applyTransform(Image.fromarray(probe), transform), np.int16)
    return None if np.abs(found - expected).max() <= _SAME_COLORS else transform


def _only_perceptual(icc: bytes) -> bytes:
    """The profile without the other tables if it has a perceptual one: littlecms takes that for every intent then."""
    (num_tags,) = struct.unpack_from(">I", icc, 128) if len(icc) >= 132 else (0,)
    places = range(132, min(132 + 12 * num_tags, len(icc)), 12)
    names = {place: icc[place : place + 4] for place in places}
    if b"A2B0" not in names.values():
        return icc
    changed = bytearray(icc)
    for place, name in names.items():
        if name in _ICC_RIVALS:
            changed[place : place + 4] = name.lower()
    return bytes(changed)


def _cube(steps: np.ndarray) -> np.ndarray:
    """Every colour with channels from `steps`, [n * n, n, 3]."""
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1)
    return np.ascontiguousarray(grid.reshape(-1, len(steps), 3))


def _numbers_encoding(info: Mapping[Any, Any]) -> Encoding | None:
    """The encoding from a PNG's gamma and chromaticities; None if they are absent, mean sRGB or a profile overrides."""
    if "icc_profile" in info or "srgb" in info:
        return None
    gamma, numbers = info.get("gamma"), info.get("chromaticity")
    primaries = _SRGB
    if numbers is not None and len(numbers) == 8:
        x, y = numbers[0::2], numbers[1::2]
        white, red, green, blue = zip(x, y, strict=True)
        primaries = (red, green, blue, white)
        flat = np.array(primaries)
        # Ignore primaries that can't form a triangle around their white.
        if min(flat[:, 1]) <= 0 or np.abs(flat - _SRGB).max() <= _SAME_PRIMARIES or not _is_sound(primaries):
            primaries = _SRGB
    if gamma is not None and (gamma <= 0 or abs(gamma * 2.2 - 1) < _SAME_GAMMA):
        gamma = None
    if gamma is None and primaries is _SRGB:
        return None
    return Encoding(_srgb_light if gamma is None else functools.partial(_power_light, 1 / gamma), primaries)


def code_points(stream: BinaryIO, format: str | None) -> tuple[int, int] | None:
    """(primaries, transfer) from a PNG's cICP chunk or an AVIF's `colr` box, which Pillow ignores.

    Restores the stream's position.
    """
    before = stream.tell()
    try:
        if format == "AVIF":
            stream.seek(0)
            _, box, numbers = stream.read(_AVIF_HEAD_BYTES).partition(b"colrnclx")
            return struct.unpack_from(">2H", numbers) if box else None
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if name == b"cICP" and length == 4:
                primaries, transfer, _, _ = stream.read(4)
                return primaries, transfer
            if name in (b"IDAT", b"IEND"):
                return None
            stream.seek(length + 4, io.SEEK_CUR)
        return None
    except (ValueError, OSError, struct.error):
        return None
    finally:
        stream.seek(before)


def _same_light(values: np.ndarray) -> np.ndarray:
    return values


def _power_light(exponent: float, values: np.ndarray) -> np.ndarray:
    return values**exponent


def _srgb_light(values: np.ndarray) -> np.ndarray:
    """IEC 61966-2-1."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _pq_light(values: np.ndarray) -> np.ndarray:
    """SMPTE ST 2084's EOTF; 1 is white."""
    return _pq_nits(values) / _WHITE


def _pq_nits(values: np.ndarray) -> np.ndarray:
    root = values ** (1 / _PQ_M2)
    return 10000 * (np.maximum(root - _PQ_C1, 0) / (_PQ_C2 - _PQ_C3 * root)) ** (1 / _PQ_M1)


def _pq_values(nits: np.ndarray) -> np.ndarray:
    power = (nits / 10000) ** _PQ_M1
    return ((_PQ_C1 + _PQ_C2 * power) / (1 + _PQ_C3 * power)) ** _PQ_M2


_PQ_M1, _PQ_M2 = 2610 / 16384, 2523 / 4096 * 128
_PQ_C1, _PQ_C2, _PQ_C3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32


def _hlg_light(values: np.ndarray) -> np.ndarray:
    """BT.2100's HLG on a display of 1,000 cd/m2, with the system gamma applied per channel; 1 is white."""
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    scene = np.where(values <= 0.5, values**2 / 3, (np.exp((values - c) / a) + b) / 12)
    return scene**1.2 * _PEAK / _WHITE


def _toned(light: np.ndarray) -> np.ndarray:
    """BT.2390-10's EETF from `_PEAK` to white: identity up to a knee, then a Hermite spline that ends at 1."""
    source_peak = float(_pq_values(np.array(_PEAK)))
    values = np.minimum(_pq_values(light * _WHITE) / source_peak, 1)
    most = float(_pq_values(np.array(_WHITE))) / source_peak
    knee = 1.5 * most - 0.5
    t = (values - knee) / (1 - knee)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (-2 * t**3 + 3 * t**2) * most
    return np.minimum(_pq_nits(np.where(values < knee, values, spline) * source_peak) / _WHITE, 1)


def _encode(light: np.ndarray) -> np.ndarray:
    """Converts linear light (1 is white) to sRGB uint8."""
    clipped = np.clip(light, 0, 1)
    encoded = np.where(clipped <= 0.0031308, clipped * 12.92, 1.055 * clipped ** (1 / 2.4) - 0.055)
    return (encoded * 255 + 0.5).astype(np.uint8)


def _is_sound(primaries: Chromaticities) -> bool:
    matrix = _to_xyz(primaries)
    return bool(np.isfinite(matrix).all() and np.linalg.cond(matrix) < 1e3)


def _between(source: Chromaticities, target: Chromaticities) -> np.ndarray:
    """The matrix from one set of primaries to another in linear light. It maps white to white."""
    return np.linalg.inv(_to_xyz(target)) @ _to_xyz(source)


def _to_xyz(primaries: Chromaticities) -> np.ndarray:
    """The matrix to XYZ (SMPTE RP 177). Scales X, Y and Z so that white becomes D65."""
    *colors, white = (np.array([x / y, 1, (1 - x - y) / y]) if y else np.full(3, np.inf) for x, y in primaries)
    columns = np.stack(colors, axis=1)
    if not np.isfinite(columns).all() or abs(np.linalg.det(columns)) < 1e-9:
        return np.full((3, 3), np.inf)
    adapted = columns * np.linalg.solve(columns, white)
    d65 = np.array([_D65[0] / _D65[1], 1, (1 - sum(_D65)) / _D65[1]])
    return np.diag(d65 / white) @ adapted
