"""Accounts in a file: what is written, who is let in, and what a changed or damaged file does."""

from __future__ import annotations

import logging
import stat
import threading
from pathlib import Path

import pytest

from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile, GivenAccounts
from qwen35mm.cli import main
from qwen35mm.errors import ConfigError

USUAL_COST = accounts.COST


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "COST", (2, 8, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "accounts"


def test_a_guess_is_dear() -> None:
    n, r, p = USUAL_COST
    assert (128 * n * r, p) >= (32 << 20, 3)


def test_a_name_that_there_is_not_takes_as_much(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people = AccountFile(path)
    people.add("bob", "secret words")
    costs: list[tuple[int, ...]] = []
    scrypt = accounts._scrypt

    def counted(password: str, salt: bytes, *cost: int) -> bytes:
        costs.append((len(salt), *cost))
        return scrypt(password, salt, *cost)

    monkeypatch.setattr(accounts, "_scrypt", counted)
    assert not people.check("bob", "another word")
    assert not people.check("nobody", "another word")
    assert costs == [(16, *accounts.COST)] * 2


def test_who_was_added_is_let_in_and_nobody_reads_the_password(path: Path) -> None:
    people = AccountFile(path)
    assert people.add(" Jürgen\u0308 ", "secret words")
    assert people.add("bob", "secret words")
    assert not people.add("bob", "other: words")
    assert AccountFile(path).names() == ["Jürgen\u0308", "bob"]
    assert people.check("bob", "other: words")
    assert not people.check("bob", "secret words")
    assert not people.check("nobody", "secret words")
    assert not people.check("bob", "")
    lines = path.read_text("utf-8").splitlines()
    assert not any("words" in line for line in lines)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    AccountFile(path).add("ann", "secret words")
    hashes = [line.partition(":")[2] for line in path.read_text("utf-8").splitlines()]
    assert len(set(hashes)) == 3, "salted: one password has several hashes"


def test_another_password_needs_the_old_one_and_is_another_stamp(path: Path) -> None:
    people = AccountFile(path)
    people.add("ann", "secret words")
    stamp = people.stamp("ann")
    assert not people.change("ann", "a guess", "other words")
    assert people.stamp("ann") == stamp
    with pytest.raises(ConfigError, match="8 to 1,024"):
        people.change("ann", "secret words", "short")
    assert people.change("ann", "secret words", "other words")
    assert people.stamp("ann") not in (None, stamp)
    assert people.check("ann", "other words")


def test_a_changed_file_is_read_again_and_a_damaged_one_isn_t_believed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people, elsewhere = AccountFile(path), AccountFile(path)
    people.add("ann", "secret words")
    assert people.stamp("bob") is None
    elsewhere.add("bob", "secret words")
    assert people.check("bob", "secret words")
    elsewhere.remove("ann")
    assert people.stamp("ann") is None
    assert not people.check("ann", "secret words")
    good = path.read_text("utf-8")
    path.write_text(f"# who may\n\n{good}ann:hash\n", "utf-8")
    with caplog.at_level(logging.WARNING, "qwen35mm.chat.accounts"):
        for _ in range(3):
            assert people.check("bob", "secret words")
    assert caplog.text.count("Line 4 of accounts") == 1
    with pytest.raises(ConfigError, match="Line 4"):
        elsewhere.add("eve", "secret words")
    path.unlink()
    assert people.check("bob", "secret words")
    with pytest.raises(ConfigError, match="account add"):
        AccountFile(path).names()


@pytest.mark.parametrize("name", ["", " ", "a:b", "#a", "a\nb", "x" * 65, "a\0"])
def test_a_name_that_can_t_be_one(path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="A name has"):
        AccountFile(path).add(name, "secret words")
    assert not path.exists()


def test_many_are_added_at_one_time(path: Path) -> None:
    threads = [
        threading.Thread(target=AccountFile(path).add, args=(f"ann {number}", "secret words")) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(AccountFile(path).names()) == [f"ann {number}" for number in range(8)]


def test_given_accounts_stay_as_they_are() -> None:
    people = GivenAccounts({"ann": "x"})
    assert (people.check("ann", "x"), people.check("ann", ""), people.check("bob", "")) == (True, False, False)
    with pytest.raises(ConfigError, match="can't be changed here"):
        people.change("ann", "x", "other words")


def test_the_command_line_asks_without_an_echo(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["secret words", "secret words", "one two three", "one two four"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(answers))

    def run(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["account", *words, "--auth-file", str(path)])
        said = capsys.readouterr()
        return said.out + said.err

    assert "ann may log in now" in run("add", "ann")
    assert AccountFile(path).check("ann", "secret words")
    assert "The passwords differ" in run("add", "bob")
    monkeypatch.setenv("QWEN35MM_AUTH_FILE", str(path))
    assert run("list") == "ann\n"
    assert "Nobody" in run("remove", "bob")
    assert "can no longer log in" in run("remove", "ann")
    assert AccountFile(path).names() == []
