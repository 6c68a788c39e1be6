from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.cache.disk_format import (
    HEAD_BYTES,
    DiskEntry,
    Label,
    UnusableFileError,
    checksum_in,
    is_finite,
    pack,
    unpack,
)
from tests.cache.disk_helpers import METADATA, OTHER_ROOT, ROOT, address_of, same, tensors_of

LABEL = Label("state", address_of(1), ROOT)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def written(tensors: dict[str, torch.Tensor], metadata: dict[str, str] = METADATA, label: Label = LABEL) -> bytes:
    file = io.BytesIO()
    packed = pack(tensors, metadata, label)
    packed.write_to(file)
    assert packed.num_bytes == len(file.getvalue())
    return file.getvalue()


def read(content: bytes, label: Label = LABEL) -> DiskEntry:
    return unpack(as_tensor(content[HEAD_BYTES:]), checksum_in(content[:HEAD_BYTES]), label)


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def forged(image: bytes) -> bytes:
    """A file with a right checksum over any image."""
    return written({})[:16] + hashlib.sha256(image).digest() + image


def image_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    numbers = torch.arange(-60, 60).to(dtype)
    tensors = {"a": numbers.view(2, 3, 4, 5), "scalar": numbers[3], "none": numbers[:0].view(0, 7)}
    if dtype.is_floating_point:
        tensors["extremes"] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny, -0.0], dtype=dtype)
    entry = read(written(tensors))
    assert same(entry, tensors)
    assert entry.metadata == METADATA


def test_strided_tensors_are_written_in_their_order() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    tensors = {"t": base.transpose(0, 2), "s": base[:, ::2, 1:]}
    assert same(read(written(tensors)), {name: tensor.contiguous() for name, tensor in tensors.items()})


def test_the_image_is_a_safetensors_file() -> None:
    tensors = tensors_of("state", LABEL.address) | tensors_of("kv", LABEL.address)
    image = written(tensors)[HEAD_BYTES:]
    oracle = safetensors.torch.load(image)
    assert same(DiskEntry(oracle, {}), tensors)
    # And what the library writes is read.
    tags = LABEL.tags() | {"caller.length": "7"}
    entry = read(forged(safetensors.torch.save(tensors, tags)))
    assert same(entry, tensors)
    assert entry.metadata == {"length": "7"}


def test_tensors_lie_at_multiples_of_their_item_size_and_the_first_at_64() -> None:
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in zip("abcdefg", reversed(DTYPES), strict=True)}
    image = as_tensor(written(tensors)[HEAD_BYTES:])
    length = int.from_bytes(image[:8].numpy().tobytes(), "little")
    assert (8 + length) % 64 == 0
    header = json.loads(image[8 : 8 + length].numpy().tobytes())
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_metadata_can_not_pose_as_the_label() -> None:
    metadata = {"kind": "kv", "root": "none", "caller.kind": "x", "": "empty", "\ud800": "\udfff\x00"}
    entry = read(written({}, metadata))
    assert entry.metadata == metadata
    with pytest.raises(UnusableFileError, match="another kind"):
        read(written({}, metadata), replace(LABEL, kind="kv"))


@pytest.mark.parametrize(
    ("label", "what"),
    [
        (replace(LABEL, kind="kv"), "kind"),
        (replace(LABEL, address=address_of(2)), "address"),
        (replace(LABEL, root=OTHER_ROOT), "root"),
    ],
)
def test_a_file_of_something_else_is_refused(label: Label, what: str) -> None:
    content = written(tensors_of("state", LABEL.address))
    with pytest.raises(UnusableFileError, match=f"another {what}"):
        read(content, label)


def test_every_truncation_and_every_flipped_byte_is_refused() -> None:
    content = written(tensors_of("state", LABEL.address))
    assert same(read(content), tensors_of("state", LABEL.address))
    for length in range(len(content)):
        with pytest.raises(UnusableFileError):
            read(content[:length])
    for offset in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[offset] ^= mask
            with pytest.raises(UnusableFileError):
                read(bytes(damaged))
    for longer in (content + b"\0", content + content, b"\0" + content):
        with pytest.raises(UnusableFileError):
            read(longer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(dtype: torch.dtype, bad: float) -> None:
    for index in range(5):
        tensors = {"conv": torch.zeros(3, dtype=dtype), "recurrent": torch.ones(5, dtype=dtype)}
        tensors["recurrent"][index] = bad
        with pytest.raises(UnusableFileError, match="not finite in 'recurrent'"):
            read(written(tensors))


@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 700),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1.0]),
)
def test_finiteness_agrees_with_torch(dtype: torch.dtype, length: int, where: float, value: float) -> None:
    """Vectorised minima and maxima treat the ends of a row apart, and NaN is easily lost in a comparison."""
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    tensor[int(where * length)] = value
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert is_finite(torch.tensor([2**62, -1]))
    assert is_finite(torch.empty(0, 3))


TAGS = LABEL.tags()
NUMBERS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\xff" * 8,
        (0).to_bytes(8, "little"),
        (2**63).to_bytes(8, "little") + b"{}",
        image_of(b"no json"),
        image_of(b"\xff\xfe{}"),
        image_of(b"[" * 100_000),
        image_of([]),
        image_of({}),
        image_of({"__metadata__": None}),
        image_of({"__metadata__": {"kind": "state"}}),
        image_of({"__metadata__": TAGS | {"caller.a": 1}, "x": 3}),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"dtype": "F8_E4M3"}}, bytes(8)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"dtype": ["F32"]}}, bytes(8)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"shape": [3]}}, bytes(12)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"shape": [-1, -2]}}, bytes(8)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"shape": [2.0]}}, bytes(8)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"data_offsets": [8, 0]}}, bytes(8)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"data_offsets": [0, 8, 16]}}, bytes(16)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"data_offsets": [1, 9]}}, bytes(16)),
        image_of({"__metadata__": TAGS, "x": NUMBERS}, bytes(7)),
        image_of({"__metadata__": TAGS, "x": NUMBERS | {"shape": [2**40, 2**40]}}, bytes(8)),
    ],
)
def test_a_forged_image_is_refused(image: bytes) -> None:
    with pytest.raises(UnusableFileError):
        read(forged(image))


def test_what_can_not_be_written_is_said() -> None:
    with pytest.raises(ValueError, match=r"'x' of torch\.complex64"):
        pack({"x": torch.zeros(1, dtype=torch.complex64)}, {}, LABEL)
    with pytest.raises(ValueError, match="__metadata__"):
        pack({"__metadata__": torch.zeros(1)}, {}, LABEL)
    with pytest.raises(ValueError, match="strings to strings"):
        pack({}, {"length": 3}, LABEL)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="kind must be one of kv, state, vision"):
        Label("../x", LABEL.address, ROOT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="address must be 32 bytes"):
        Label("kv", b"short", ROOT)
    with pytest.raises(ValueError, match="root must be 32 bytes"):
        Label("kv", LABEL.address, "0" * 32)  # pyright: ignore[reportArgumentType]
