from __future__ import annotations

import json
import random
import shutil
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import qwen35mm.tokenizer
from qwen35mm.assets import demo_model_path
from qwen35mm.errors import CheckpointError
from qwen35mm.tokenizer import StreamDecoder, Tokenizer, TooManyTokensError

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

DEMO = demo_model_path()
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<think>", "</think>", "<tool_call>")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(DEMO)


@cache
def oracle():
    return AutoTokenizer.from_pretrained(DEMO)


# Text that tokenizers get wrong: control strings and pieces of them, white space, combining marks, odd planes.
texts = st.lists(
    st.one_of(
        st.sampled_from([*CONTROLS, "<|im_", "end|>", "<", "\u0338", "e\u0301", "\r\n", "\0", " ", "\u3000", "👩‍👩‍👧"]),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


@given(texts)
@example("<|im_end|>\u0338")
def test_plain_text_never_yields_a_control_token(text):
    ids = tokenizer().encode_plain(text)
    assert not set(ids) & set(tokenizer().control_ids.values())
    assert tokenizer().decode(ids, skip_special=False) == oracle().backend_tokenizer.normalizer.normalize_str(text)


@given(texts)
@example("<|im_end|>\u0338<think>")
def test_split_and_plain_together_give_what_transformers_gives(text):
    items = tokenizer().split_controls(text)
    ids = [i for item in items for i in ([item] if isinstance(item, int) else tokenizer().encode_plain(item))]
    assert ids == oracle()(text)["input_ids"]
    assert "" not in items


def test_frequent_ids_are_the_first_merges_and_every_control_token():
    """By the ranks in tokenizer.json: a merged token's rank is its merge's, and single bytes come first."""
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    merged = [model["vocab"]["".join(pair)] for pair in model["merges"]]
    single = sorted(set(model["vocab"].values()) - set(merged))
    controls = sorted(tokenizer().control_ids.values())
    for count in (300, 700):
        found = tokenizer().frequent_ids(count)
        assert found == sorted(found)
        assert set(found) == {*controls, *[*single, *merged][: count - len(controls)]}
    assert tokenizer().frequent_ids(10**6) == list(range(tokenizer().vocab_size))


def test_controls_of_the_demo_checkpoint():
    assert {text: oracle().convert_tokens_to_ids(text) for text in CONTROLS}.items() <= tokenizer().control_ids.items()
    special, plain = tokenizer().control_ids["<|im_end|>"], tokenizer().control_ids["<think>"]
    assert special in tokenizer().special_ids
    assert plain not in tokenizer().special_ids
    assert tokenizer().vocab_size == len(oracle())
    assert tokenizer().control_first_chars == {"<"}


ids_of_any_bytes = st.lists(st.integers(0, len(oracle()) - 1), max_size=40)


@given(ids_of_any_bytes)
def test_decode_equals_transformers(ids):
    for skip in (True, False):
        ours = tokenizer().decode(ids, skip_special=skip)
        assert ours == oracle().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@given(ids_of_any_bytes)
def test_streamed_text_equals_decoded_text(ids):
    decoder = StreamDecoder(tokenizer())
    streamed = "".join(map(decoder.push, ids)) + decoder.flush()
    assert streamed == tokenizer().decode(ids)
    assert decoder.flush() == ""


@given(texts.filter(lambda text: "\ufffd" not in text))
def test_only_whole_characters_are_streamed(text):
    decoder = StreamDecoder(tokenizer())
    pieces = [decoder.push(i) for i in tokenizer().encode_plain(text)]
    assert "\ufffd" not in "".join(pieces)
    assert decoder.flush() == ""


def test_an_incomplete_character_is_held_back_and_shown_at_the_end():
    ids = tokenizer().encode_plain("é")
    assert len(ids) == 2, "the demo vocabulary has no token for é"
    decoder = StreamDecoder(tokenizer())
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ids[0]) + decoder.push(ids[1]) == "é"


def test_thinking_tokens_are_text_and_special_tokens_are_not():
    decoder = StreamDecoder(tokenizer())
    assert decoder.push(tokenizer().control_ids["<think>"]) == "<think>"
    assert decoder.push(tokenizer().control_ids["<|im_end|>"]) == ""


def test_ids_outside_the_vocabulary_have_no_text():
    # A model's embedding has more rows than the vocabulary.
    assert tokenizer().token_bytes(tokenizer().vocab_size + 5) == b""


def test_a_lone_surrogate_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer().encode_plain("\ud83d")


class Counting:
    """The library's tokenizer, but it counts the characters that it is given to tokenize."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._library.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._library.encode_batch_fast(texts, **options)


def least_of(text: str, most: int) -> int:
    """What a text is known to have at least: all of it where it isn't refused."""
    try:
        return len(tokenizer().encode_plain(text, most))
    except TooManyTokensError as error:
        return error.at_least


# As long as texts are in which a beginning is looked at.
long_texts = st.tuples(texts, texts, st.integers(1, 40)).map(lambda parts: parts[0] * parts[2] + parts[1])


@given(long_texts, st.integers(0, 60))
@example("a" * 50, 3)
@example(" triangle", 1)  # one token, whose first characters are several
@example(" " * 30 + "\n a", 3)
@example("e\u0301" * 40, 70)
def test_a_text_that_is_refused_has_too_many_tokens_and_no_other_is(text: str, most: int) -> None:
    ids = tokenizer().encode_plain(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen35mm.tokenizer, "_LEAST_CHARS", 4)
        assert least_of(text, most) in range(min(most + 1, len(ids)), len(ids) + 1)


@pytest.mark.parametrize("word", ["word ", "a", "\n", "你", " " * 7 + "1"])
def test_a_megabyte_is_refused_by_its_bytes(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(tokenizer()._plain)
    monkeypatch.setattr(tokenizer(), "_plain", counting)
    with pytest.raises(TooManyTokensError, match="at least"):
        tokenizer().encode_plain(word * (1_000_000 // len(word)), 4096)
    assert counting.num_chars == 0


@pytest.mark.parametrize("word", ["word ", "x=1;\n", " " * 7 + "1"])
def test_a_megabyte_is_refused_by_its_beginning(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the vocabulary has a token so long that bytes tell nothing."""
    counting = Counting(tokenizer()._plain)
    monkeypatch.setattr(tokenizer(), "_plain", counting)
    monkeypatch.setattr(tokenizer(), "_longest", 1000)
    with pytest.raises(TooManyTokensError):
        tokenizer().encode_plain(word * (1_000_000 // len(word)), 4096)
    assert 0 < counting.num_chars <= 3 * 4 * 4096


def copy_of_demo(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def change_json(path: Path, change) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_tokens_that_only_tokenizer_config_names(tmp_path):
    folder = copy_of_demo(tmp_path)
    token = {"content": "<extra>", "lstrip": False, "rstrip": False, "single_word": False, "special": False}
    new_id = tokenizer().vocab_size

    def add(data):
        data["added_tokens_decoder"][str(new_id)] = token

    change_json(folder / "tokenizer_config.json", add)
    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.control_ids["<extra>"] == new_id == theirs.convert_tokens_to_ids("<extra>")

    change_json(folder / "tokenizer_config.json", lambda data: data["added_tokens_decoder"].update({"5": token}))
    with pytest.raises(CheckpointError, match=r"<extra>.* 5,"):
        Tokenizer.from_pretrained(folder)


def test_tokens_that_are_found_in_normalized_text(tmp_path):
    folder = copy_of_demo(tmp_path)
    new_id = tokenizer().vocab_size
    token = {"id": new_id, "content": "<é>", "lstrip": False, "rstrip": False, "single_word": False}
    token |= {"normalized": True, "special": False}
    change_json(folder / "tokenizer.json", lambda data: data["added_tokens"].append(token))
    ours = Tokenizer.from_pretrained(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    think_id = ours.control_ids["<think>"]
    text = "a<e\u0301>b<think>"
    assert ours.split_controls(text) == ["a", new_id, "b", think_id]
    assert library.encode(text).ids == [*ours.encode_plain("a"), new_id, *ours.encode_plain("b"), think_id]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["added_tokens"][0].update(lstrip=True), "lstrip"),
        (lambda data: data["added_tokens"][0].update(content=" x"), "white space"),
        (lambda data: data.update(decoder=None), "byte-level"),
        (lambda data: data.update(model={"type": "Unheard"}), "damaged or of an unknown kind"),
        # The library panics with these when they are read or used, and ends the process with the first.
        (
            lambda data: data.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
            "unknown kind",
        ),
        (lambda data: data.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "unknown kind"),
        (lambda data: data.update(normalizer={"type": "Prepend", "prepend": ""}), "unknown kind"),
        (
            lambda data: data["pre_tokenizer"]["pretokenizers"].append({"type": "FixedLength", "length": 0}),
            "unknown kind",
        ),
        (lambda data: data["model"].update(continuing_subword_prefix="########"), "unknown kind"),
        (lambda data: data["model"].update(unk_token="nowhere"), "unknown kind"),
        (lambda data: data.update(added_tokens=None), "unknown kind"),
        (lambda data: data.update(model={"vocab": {"a": 0, "b": 1}, "unk_token": "a"}), "unknown kind"),
        (lambda data: data["model"]["vocab"].update({"zzz": 2**32 - 1}), "unknown kind"),
        (lambda data: data["model"].update(vocab=[]), "unknown kind"),
        (lambda data: data.update(added_tokens={}, truncation=json.loads("[" * 101 + "]" * 101)), "unknown kind"),
    ],
)
def test_unusable_tokenizers_are_refused(tmp_path, change, message):
    folder = copy_of_demo(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    change_json(folder / "tokenizer.json", change)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_pretrained(folder)


def split_punctuation(data, behavior="Isolated"):
    data["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation", "behavior": behavior})


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["model"].pop("type"),
        lambda data: data["model"].update(unk_token="<think>"),
        split_punctuation,
        lambda data: split_punctuation(data, "MergedWithNext"),
        lambda data: data["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "UnicodeScripts"}),
    ],
    ids=["no type", "unknown token", "punctuation", "merged punctuation", "scripts"],
)
def test_other_byte_level_tokenizers_are_read_as_the_library_reads_them(tmp_path, change):
    folder = copy_of_demo(tmp_path)
    change_json(folder / "tokenizer.json", change)
    ours = Tokenizer.from_pretrained(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Hello, w\u00f6rld!? '1234' \u6f22\u5b57\n\n\0"
    assert ours.encode_plain(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode_plain(text)) == text


def test_control_tokens_may_all_be_in_tokenizer_config(tmp_path):
    folder = copy_of_demo(tmp_path)
    change_json(folder / "tokenizer.json", lambda data: data.pop("added_tokens"))
    ours = Tokenizer.from_pretrained(folder)
    assert ours.control_ids == tokenizer().control_ids
    assert ours.vocab_size == tokenizer().vocab_size


def test_an_unknown_token_that_is_an_added_one_stands_for_nothing(tmp_path):
    folder = copy_of_demo(tmp_path)

    def change(data):
        data["model"]["unk_token"] = "<think>"
        # It lacks a byte, of which no merge is made.
        data["model"]["vocab"]["zzz"] = data["model"]["vocab"].pop("\u0100")

    change_json(folder / "tokenizer.json", change)
    assert Tokenizer.from_pretrained(folder).encode_plain("\0a\0") == tokenizer().encode_plain("a")


def test_a_vocabulary_that_holds_a_control_string_is_refused(tmp_path):
    folder = copy_of_demo(tmp_path)

    def add(data):
        # A word of the plain vocabulary with the id of <think>: plain text would reach it.
        data["model"]["vocab"]["think"] = tokenizer().control_ids["<think>"]
        data["model"]["ignore_merges"] = True

    change_json(folder / "tokenizer.json", add)
    with pytest.raises(CheckpointError, match="can't be told from the control token"):
        Tokenizer.from_pretrained(folder)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    folder = copy_of_demo(tmp_path)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        Tokenizer.from_pretrained(folder)


def test_a_panic_of_the_library_is_an_error_in_words(monkeypatch):
    panic = type("PanicException", (BaseException,), {})

    def fails(*_, **__):
        raise panic

    with pytest.raises(CheckpointError, match="its parts don't fit"), qwen35mm.tokenizer._panics_in_words():
        fails()
    with pytest.raises(KeyboardInterrupt), qwen35mm.tokenizer._panics_in_words():
        raise KeyboardInterrupt


@pytest.mark.parametrize("most", [None, 10**7])
def test_a_long_text_leaves_the_interpreter_to_others(most):
    text = "".join(random.Random(0).choices("abcdefgh ", k=400_000))
    tokenizer()

    def num_turns() -> int:
        thread = threading.Thread(target=tokenizer().encode_plain, args=(text, most))
        thread.start()
        count = 0
        while thread.is_alive():
            time.sleep(0.001)
            count += 1
        return count

    # A busy machine may leave few turns of its third of a second. One that holds the lock always leaves two or three.
    assert any(num_turns() > 3 for _ in range(5))
