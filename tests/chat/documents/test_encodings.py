"""Texts in the encodings that files come in, and what is no text in any."""

from __future__ import annotations

import random

import pytest

from qwen35mm.chat.documents.encodings import ENCODINGS, JUDGED, decode, decode_as

GERMAN = "Die Straße war naß, und über den Häusern stand der Mond. „Schön“, sagte er – und ging. 5 €\n"
SPANISH = "¿Dónde está el niño? Mañana vendrá el señor Muñoz.\n"
POLISH = "Zażółć gęślą jaźń. Wszyscy ludzie rodzą się wolni i równi pod względem swej godności.\n"
RUSSIAN = "Привет, мир! Все люди рождаются свободными и равными.\n"
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι.\n"
ARABIC = "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.\n"
JAPANESE = "こんにちは、世界。すべての人間は、生まれながらにして自由です。\n"
CHINESE = "这是一个测试文件,里面有一些中文。人人生而自由,在尊严和权利上一律平等。\n"
TRADITIONAL = "人人生而自由,在尊嚴和權利上一律平等。他們賦有理性和良心。\n"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 존엄하고 평등하다.\n"


@pytest.mark.parametrize(
    ("text", "codec", "name"),
    [
        (GERMAN, "utf-8", "UTF-8"),
        (GERMAN, "utf-8-sig", "UTF-8"),
        (GERMAN, "utf-16", "UTF-16"),
        (GERMAN, "utf-16-le", "UTF-16LE"),
        (GERMAN, "utf-16-be", "UTF-16BE"),
        (GERMAN, "utf-32", "UTF-32"),
        (GERMAN, "cp1252", "Windows-1252"),
        (SPANISH, "latin-1", "Windows-1252"),
        ("Käse\n", "cp1252", "Windows-1252"),
        ("int size; // Größe\n" + "int x = 1;\n" * 5000, "cp1252", "Windows-1252"),
        (POLISH, "cp1250", "Windows-1250"),
        (POLISH, "iso8859_2", "ISO-8859-2"),
        (RUSSIAN, "cp1251", "Windows-1251"),
        (RUSSIAN, "koi8_r", "KOI8-R"),
        (RUSSIAN, "cp866", "IBM866"),
        (GREEK, "cp1253", "Windows-1253"),
        (ARABIC, "cp1256", "Windows-1256"),
        (JAPANESE, "cp932", "Shift-JIS"),
        (JAPANESE, "euc_jp", "EUC-JP"),
        (JAPANESE, "iso2022_jp", "ISO-2022-JP"),
        (CHINESE, "gb18030", "GB18030"),
        (TRADITIONAL, "big5", "Big5"),
        (KOREAN, "cp949", "EUC-KR"),
    ],
)
def test_a_text_is_read_in_its_encoding(text: str, codec: str, name: str) -> None:
    data = text.encode(codec)
    assert decode(data) == (text, name)
    assert decode_as(data, name) == text


def test_what_a_file_says_of_itself_is_believed() -> None:
    hebrew = "כל בני האדם נולדו בני חורין\n"
    for declaration in ('<meta charset="windows-1255">\n', "# -*- coding: cp1255 -*-\n"):
        assert decode((declaration + hebrew).encode("cp1255")) == (declaration + hebrew, "Windows-1255")
    wrong = '<?xml version="1.0" encoding="euc-jp"?>\n' + RUSSIAN
    assert decode(wrong.encode("koi8_r")) == (wrong, "KOI8-R"), "but not where it can't be"
    assert decode(b"\xe4 coding: nonsense\n") == ("ä coding: nonsense\n", "Windows-1252")


def test_the_beginning_of_a_long_text_tells() -> None:
    for codec, name in (("cp932", "Shift-JIS"), ("utf-8", "UTF-8"), ("utf-16-le", "UTF-16LE")):
        text = ("a" + JAPANESE) * 50 if codec != "utf-16-le" else GERMAN * 50
        data = text.encode(codec)
        for end in range(2000, 2008):
            found = decode(data[:end], final=False)
            assert found is not None
            assert (found[1], text.startswith(found[0])) == (name, True)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03" * 50,
        b"\x89PNG\r",
        b"MZ\x90\x00" + b"\x00" * 99,
        random.Random(0).randbytes(5000),
        b"\xff\xfe\xff",
    ],
)
def test_what_is_no_text_is_none(data: bytes) -> None:
    assert decode(data) is None


def test_another_encoding_is_taken_by_its_name() -> None:
    assert decode_as("Größe".encode("cp1252"), "KOI8-R") == "GrЖъe"
    assert decode_as(b"\xe4", "UTF-8") is decode_as(b"a", "utf_7") is decode_as(b"a", "") is None
    assert set(ENCODINGS) > JUDGED
