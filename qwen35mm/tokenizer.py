"""Text to token ids and back, from a checkpoint's tokenizer.json.

There are two ways in on purpose: `encode_plain` never yields a control token; `split_controls` finds the control tokens
in a template's text. Nothing here knows about messages.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from qwen35mm.errors import CheckpointError
from qwen35mm.malloc import give_back_freed
from qwen35mm.outside_json import read_json

# Characters to try first for each allowed token: most texts have fewer per token.
_CHARS_PER_TOKEN = 4
# Texts up to this length are always encoded whole.
_LEAST_CHARS = 1024
# Limit for tokenizer.json: the family's has 248,000 tokens and as many merges, of three values each.
_MAX_VALUES = 8_000_000
_MAX_ID = 1 << 24
# Bytes of a tokenizer.json whose reading leaves much memory freed.
_LARGE_FILE = 1 << 20
# The allowed types of tokenizer.json's parts, and the key of a sequence's items.
_PARTS = {
    "normalizer": (("NFC", "NFD", "NFKC", "NFKD"), "normalizers"),
    "pre_tokenizer": (("Split", "ByteLevel", "Digits", "Punctuation", "UnicodeScripts"), "pretokenizers"),
    "post_processor": (("ByteLevel", "TemplateProcessing"), "processors"),
    "decoder": (("ByteLevel",), "decoders"),
}


class TooManyTokensError(Exception):
    """A text has more tokens than the caller can use.

    Attributes:
        at_least: a lower bound of its tokens.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least:,} tokens")
        self.at_least = at_least


class Tokenizer:
    """A byte-level BPE tokenizer with its control tokens kept apart.

    "Control token" means every added token, whether tokenizer.json marks it special (`<|im_end|>`) or not (`<think>`).

    Attributes:
        control_ids: text of each control token -> id.
        special_ids: ids of those marked special: `decode` and `StreamDecoder` skip them.
        control_first_chars: the characters that control tokens begin with.
        vocab_size: one more than the largest id. A model's embedding may have more rows.
    """

    def __init__(self, full: tokenizers.Tokenizer) -> None:
        if not isinstance(full.decoder, decoders.ByteLevel):
            raise CheckpointError("tokenizer.json: a byte-level BPE tokenizer is expected (decoder 'ByteLevel').")
        added = full.get_added_tokens_decoder()
        _check_added(added.values())
        self._full = full
        # The same model without added tokens: no text can produce a control token.
        self._plain = tokenizers.Tokenizer(full.model)
        self._plain.normalizer = full.normalizer  # pyright: ignore[reportAttributeAccessIssue]
        self._plain.pre_tokenizer = full.pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self._token_bytes = _TokenBytes(full)
        self._raw_pattern = _pattern(token.content for token in added.values() if not token.normalized)
        self._normalized_pattern = _pattern(token.content for token in added.values() if token.normalized)
        self._control_id_set = frozenset(added)
        self.control_ids: Mapping[str, int] = MappingProxyType({t.content: i for i, t in sorted(added.items())})
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_first_chars = frozenset(text[0] for text in self.control_ids)
        vocab = full.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values())
        # In bytes: a byte-level token has one character for each.
        self._longest = max(map(len, vocab))
        for text in self.control_ids:
            if not self._control_id_set.isdisjoint(self._encode(text)):
                raise CheckpointError(f"tokenizer.json: the plain text {text!r} can't be told from the control token.")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Reads `folder`/tokenizer.json, and the control tokens that tokenizer_config.json adds.

        Raises:
            CheckpointError: a file is missing or damaged, or isn't a tokenizer of the supported kind.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path.parent.name or path.parent}: no tokenizer.json in this folder.")
        with _panics_in_words():
            try:
                _check_parts(read_json(path, max_values=_MAX_VALUES))
                full = tokenizers.Tokenizer.from_file(str(path))
                if not isinstance(full.model, models.BPE):
                    raise ValueError("no BPE")
                unknown = full.model.unk_token
                if unknown is not None and full.model.token_to_id(unknown) is None:
                    # The library fails if this is an added token. A byte-level model needs none.
                    full.model.unk_token = None
            except Exception as error:  # the library raises bare Exception
                raise CheckpointError("tokenizer.json can't be read: it is damaged or of an unknown kind.") from error
            _add_configured_tokens(full, read_tokenizer_config(folder))
            made = cls(full)
        if path.stat().st_size >= _LARGE_FILE:
            # Reading took more than the tokenizer does.
            give_back_freed()
        return made

    def encode_plain(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of `text` taken literally: `<|im_end|>` is encoded as ordinary text.

        Args:
            most: the most tokens that the caller can use. A long text with more stops early; a short one is encoded.

        Raises:
            ValueError: the text holds a lone surrogate, which has no UTF-8 form.
            TooManyTokensError: it is long, and has more than `most` tokens.
        """
        try:
            if most is not None:
                self._check_beginnings(text, most)
            return self._encode(text)
        except TypeError as error:
            raise ValueError("The text holds a lone surrogate.") from error

    def frequent_ids(self, count: int) -> list[int]:
        """The most frequent ids, at most `count`, in order: all control tokens and the first others.

        Byte-level BPE numbers its tokens as training merged them, the most frequent first.
        """
        plain = (id_ for id_ in range(self.vocab_size) if id_ not in self._control_id_set)
        return sorted([*self._control_id_set, *islice(plain, max(count - len(self._control_id_set), 0))])

    def split_controls(self, text: str) -> list[str | int]:
        """Splits `text` into plain parts (str, never empty) and control ids (int), in order.

        Plain parts are for `encode_plain`. Together they give transformers' ids for the whole text.
        """
        items = self._split(self._raw_pattern, text)
        if self._normalized_pattern is None or self._plain.normalizer is None:
            return items
        normalize = self._plain.normalizer.normalize_str
        return [
            part
            for item in items
            for part in (self._split(self._normalized_pattern, normalize(item)) if isinstance(item, str) else [item])
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id, possibly a part of one UTF-8 character; empty if the id is unknown."""
        return self._token_bytes[token_id]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that aren't UTF-8 become U+FFFD. Special tokens are skipped unless asked for."""
        skipped = self.special_ids if skip_special else frozenset()
        token_bytes = self._token_bytes
        return b"".join([token_bytes[i] for i in ids if i not in skipped]).decode("utf-8", "replace")

    def _encode(self, text: str) -> list[int]:
        # Not `encode`: it holds the interpreter's lock, for seconds with a long text, and computes offsets.
        with _panics_in_words():
            return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _check_beginnings(self, text: str, most: int) -> None:
        """Raises TooManyTokensError if a long text certainly has more than `most` tokens: by its bytes and the longest
        token, or by its beginnings.

        Texts are split into words from the left, looking one character ahead, and each word becomes tokens by itself.
        So all words of a beginning except its last are words of the whole text; we leave out one more, to be safe.
        """
        if most < 0:
            raise TooManyTokensError(0)
        size = max(_CHARS_PER_TOKEN * most, _LEAST_CHARS)
        if len(text) <= size:
            return
        normalizer = self._plain.normalizer
        # A normalizer may shorten a text.
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        fewest = -(-len(normalized.encode()) // self._longest)
        if fewest > most:
            raise TooManyTokensError(fewest)
        while size < len(text):
            # `encode_batch_fast` numbers words differently.
            with _panics_in_words():
                words = self._plain.encode_batch([text[:size]], add_special_tokens=False)[0].word_ids
            last = words[-1] if words else None
            at_least = 0 if last is None else bisect_left(words, last - 1, key=lambda word: word or 0)
            if at_least > most:
                raise TooManyTokensError(at_least)
            size *= 2

    def _split(self, pattern: re.Pattern[str] | None, text: str) -> list[str | int]:
        if pattern is None:
            return [text] if text else []
        # With one group, re.split puts the control tokens at odd positions.
        parts = pattern.split(text)
        return [self.control_ids[part] if at % 2 else part for at, part in enumerate(parts) if part]


class StreamDecoder:
    """Decodes one reply token by token, in whole characters only.

    All results of `push` and a last `flush` together equal `Tokenizer.decode` of the same ids. A token's cost doesn't
    depend on the reply's length. Special tokens give no text; the caller handles others, such as `<think>`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character still lacks bytes."""
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character. Resets the decoder."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def read_tokenizer_config(folder: str | Path) -> dict[str, Any]:
    """tokenizer_config.json as a dict; empty if there is none. Raises CheckpointError if it is damaged."""
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tokenizer_config.json can't be read as JSON ({type(error).__name__}).") from error
    if not isinstance(data, dict):
        raise CheckpointError("tokenizer_config.json must hold a JSON object.")
    return data


def _check_parts(data: Any) -> None:
    """Refuses what no byte-level BPE has: some of it makes the library end the process while reading.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is of another kind.
    """
    model = data["model"]
    foreign = [model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")]
    added = data.get("added_tokens", ())
    known = {None, *model["vocab"], *(token["content"] for token in added)}
    ids = [*model["vocab"].values(), *(token["id"] for token in added)]
    # Very old files don't name their model's type.
    if model.get("type", "BPE") != "BPE" or any(foreign) or model.get("unk_token") not in known:
        raise ValueError("no BPE of bytes")
    if not all(type(token_id) is int and 0 <= token_id < _MAX_ID for token_id in ids):
        raise ValueError("an id without an embedding")
    for name, (kinds, members) in _PARTS.items():
        parts = [data.get(name)]
        while parts:
            part = parts.pop()
            if part is None:
                continue
            if part["type"] == "Sequence":
                parts += part[members]
            elif part["type"] not in kinds:
                raise ValueError(f"a {name} that is {part['type']}")


@contextlib.contextmanager
def _panics_in_words() -> Iterator[None]:
    """Turns the library's panics, which aren't Exceptions, into CheckpointErrors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            "tokenizer.json: its parts don't fit together, and the tokenizer library fails. Download it again."
        ) from error


def _add_configured_tokens(full: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the control tokens that only tokenizer_config.json names, as transformers does."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = {token.content for token in full.get_added_tokens_decoder().values()}
    try:
        missing = sorted((int(i), token) for i, token in listed.items() if token["content"] not in known)
        for token_id, token in missing:
            flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
            full.add_tokens([AddedToken(token["content"], normalized=bool(token.get("normalized")), **flags)])
            if full.token_to_id(token["content"]) != token_id:
                raise CheckpointError(
                    f"tokenizer_config.json gives {token['content']!r} the id {token_id}, which tokenizer.json can't."
                )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder isn't a table of tokens.") from error


def _check_added(added: Iterable[AddedToken]) -> None:
    for token in added:
        if token.lstrip or token.rstrip or token.single_word:
            raise CheckpointError(f"tokenizer.json: {token.content!r} uses lstrip, rstrip or single_word; unsupported.")
        if not token.content or token.content[0].isspace():
            raise CheckpointError(f"tokenizer.json: the added token {token.content!r} begins with white space.")


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    # Leftmost first, then the longest: the library's matching order.
    ordered: Sequence[str] = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class _TokenBytes(dict[int, bytes]):
    """`Tokenizer.token_bytes` by id, filled at first use."""

    def __init__(self, full: tokenizers.Tokenizer) -> None:
        self._full = full

    def __missing__(self, token_id: int) -> bytes:
        token = self._full.id_to_token(token_id)
        self[token_id] = found = b"" if token is None else _to_bytes(token)
        return found


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token, whose text is plain text
        return token.encode("utf-8")
