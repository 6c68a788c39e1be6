"""Who may log in: a file of names and password hashes, one account a line, readable by its owner only.

    name:scrypt$32768$8$3$<salt>$<hash>

Salt and hash are in base64. Empty lines and lines that begin with "#" stay as they are. The file is read again when it
changes. A write replaces the whole file with a rename, under a lock file beside it.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import secrets
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import filelock

from qwen35mm.errors import ConfigError, StorageError
from qwen35mm_preprocess.say import say

logger = logging.getLogger(__name__)

MIN_PASSWORD_CHARS = 8
MAX_PASSWORD_CHARS = 1024
_MAX_NAME_CHARS = 64
_MAX_FILE_BYTES = 4 << 20
_LOCK_TIMEOUT_S = 10.0
# n, r and p of scrypt: each guess takes 32 MiB and a quarter of a second.
COST = (1 << 15, 8, 3)
_HASH = re.compile(r"scrypt\$(\d{1,8})\$(\d{1,3})\$(\d{1,3})\$([A-Za-z0-9+/=]{8,200})\$([A-Za-z0-9+/=]{8,200})")


class Accounts(Protocol):
    """Who may log in."""

    can_change: bool

    def check(self, name: str, password: str) -> bool:
        """Whether this is the person's password. Takes as long for an unknown name."""
        ...

    def stamp(self, name: str) -> str | None:
        """A value that changes with the person's password; None for an unknown name."""
        ...

    def change(self, name: str, old: str, new: str) -> bool:
        """Changes a person's password; False if the old one is wrong.

        Raises:
            ConfigError: the new password is invalid, or passwords can't be changed here.
            StorageError: the file can't be written.
        """
        ...


class GivenAccounts:
    """Names and passwords that the program was started with."""

    can_change = False

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._passwords = dict(pairs)

    def check(self, name: str, password: str) -> bool:
        known = self._passwords.get(name)
        return secrets.compare_digest((known or "").encode(), password.encode("utf-8", "replace")) and known is not None

    def stamp(self, name: str) -> str | None:
        return self._passwords.get(name)

    def change(self, name: str, old: str, new: str) -> bool:
        raise ConfigError(say("Passwords that the program was started with can't be changed here."))


class AccountFile:
    """A file of accounts. Safe for use by several threads and processes.

    Args:
        path: the file; `add` creates it.
    """

    can_change = True

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._lock = threading.Lock()
        self._read_as: tuple[int, ...] | None = None
        self._hashes: dict[str, str] = {}
        self._told = ""

    def names(self) -> list[str]:
        """The names in the file's order. Raises ConfigError if the file can't be read."""
        return list(self._read())

    def check(self, name: str, password: str) -> bool:
        known = self._known().get(_normal(name))
        # An unknown name takes as long: one hash.
        return _matches(known or _nobodys(), password) and known is not None

    def stamp(self, name: str) -> str | None:
        return self._known().get(name)

    def add(self, name: str, password: str) -> bool:
        """Adds a person, or changes the password of one; returns whether the name is new.

        Raises:
            ConfigError: the name or the password is invalid, or the file can't be read.
            StorageError: the file can't be written.
        """
        name = checked_name(name)
        line = f"{name}:{_hash(checked_password(password))}"
        is_new = True

        def changed(lines: list[str]) -> list[str]:
            nonlocal is_new
            others = [each for each in lines if _name_of(each) != name]
            is_new = len(others) == len(lines)
            return [*lines, line] if is_new else [line if _name_of(each) == name else each for each in lines]

        self._write(changed)
        return is_new

    def remove(self, name: str) -> bool:
        """Removes a person and ends their sessions; returns whether the name was there. Raises what `add` does."""
        name, was_there = _normal(name), False

        def changed(lines: list[str]) -> list[str]:
            nonlocal was_there
            others = [each for each in lines if _name_of(each) != name]
            was_there = len(others) < len(lines)
            return others

        self._write(changed)
        return was_there

    def change(self, name: str, old: str, new: str) -> bool:
        if not self.check(name, old):
            return False
        self.add(name, new)
        return True

    def _known(self) -> dict[str, str]:
        """The accounts as the file is now, or as last read if it can't be read any more."""
        with self._lock:
            try:
                self._read()
                self._told = ""
            except ConfigError as error:
                if str(error) != self._told:
                    self._told = str(error)
                    logger.warning("accounts stay as they were: %s", error)
            return self._hashes

    def _read(self) -> dict[str, str]:
        try:
            stat = self._path.stat()
            read_as = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if read_as == self._read_as:
                return self._hashes
            if stat.st_size > _MAX_FILE_BYTES:
                raise ConfigError(say("{name} isn't an accounts file: it is too large.", name=self._path.name))
            lines = self._path.read_text("utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                say(
                    "The accounts in {path} can't be read. Make the file with "
                    "`qwen35mm account add NAME --auth-file {path}`.",
                    path=str(self._path),
                )
            ) from error
        hashes: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            name = _name_of(line)
            if name is None:
                continue
            hashed = line.strip().partition(":")[2]
            if not name or name in hashes or _HASH.fullmatch(hashed) is None:
                raise ConfigError(
                    say(
                        "Line {n} of {name} isn't an account, or repeats one: expected name:hash, as `qwen35mm "
                        "account add` writes it.",
                        n=number,
                        name=self._path.name,
                    )
                )
            hashes[name] = hashed
        if os.name == "posix" and stat.st_mode & 0o077:
            logger.warning("others can read %s: chmod 600 keeps them out", self._path)
        self._read_as, self._hashes = read_as, hashes
        return hashes

    def _write(self, change: Callable[[list[str]], list[str]]) -> None:
        try:
            with filelock.FileLock(f"{self._path}.lock", timeout=_LOCK_TIMEOUT_S, mode=0o600):
                lines = []
                if self._path.exists():
                    self._read()
                    lines = self._path.read_text("utf-8").splitlines()
                descriptor, name = tempfile.mkstemp(prefix=".accounts-", dir=self._path.parent)
                try:
                    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                        file.write("".join(f"{line}\n" for line in change(lines)))
                        file.flush()
                        os.fsync(file.fileno())
                    Path(name).replace(self._path)
                finally:
                    Path(name).unlink(missing_ok=True)
        except (OSError, filelock.Timeout) as error:
            raise StorageError(
                say("The accounts in {path} can't be written. Check the folder, and its disk.", path=str(self._path))
            ) from error


def checked_name(name: str) -> str:
    """The name in the form that is stored. Raises ConfigError."""
    name = _normal(name)
    if not name or len(name) > _MAX_NAME_CHARS or ":" in name or name.startswith("#") or not name.isprintable():
        raise ConfigError(
            say("A name has 1 to {most} characters, contains no colon and doesn't start with #.", most=_MAX_NAME_CHARS)
        )
    return name


def checked_password(password: str) -> str:
    """The password, unchanged. Raises ConfigError, whose message doesn't contain it."""
    if not MIN_PASSWORD_CHARS <= len(password) <= MAX_PASSWORD_CHARS:
        raise ConfigError(
            say("A password has {least} to {most} characters.", least=MIN_PASSWORD_CHARS, most=MAX_PASSWORD_CHARS)
        )
    return password


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip()


def _name_of(line: str) -> str | None:
    """The name on a line; None for an empty line or a comment."""
    line = line.strip()
    return None if not line or line.startswith("#") else _normal(line.partition(":")[0])


def _hash(password: str) -> str:
    salt = secrets.token_bytes(16)
    n, r, p = COST
    parts = (base64.b64encode(each).decode() for each in (salt, _scrypt(password, salt, n, r, p)))
    return "$".join(("scrypt", str(n), str(r), str(p), *parts))


def _nobodys() -> str:
    """A hash that no password has."""
    return "$".join(("scrypt", *map(str, COST), *(base64.b64encode(bytes(size)).decode() for size in (16, 32))))


def _matches(hashed: str, password: str) -> bool:
    found = _HASH.fullmatch(hashed)
    assert found is not None
    n, r, p = (int(found[group]) for group in (1, 2, 3))
    try:
        salt, expected = (base64.b64decode(found[group], validate=True) for group in (4, 5))
        return secrets.compare_digest(_scrypt(password, salt, n, r, p), expected)
    except ValueError:  # edited by hand
        return False


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    data = unicodedata.normalize("NFC", password).encode("utf-8", "replace")
    return hashlib.scrypt(data, salt=salt, n=n, r=r, p=p, maxmem=256 << 20, dklen=32)
