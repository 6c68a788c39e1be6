"""`qwen35mm account`: the people who may log in to a shared page."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from qwen35mm.errors import ConfigError
from qwen35mm.settings import auth_file_option

account = typer.Typer(name="account", help="Manage who may log in to the chat page.", no_args_is_help=True)

AuthFile = Annotated[Path, auth_file_option]


@account.command()
def add(name: Annotated[str, typer.Argument(help="The person's name.")], auth_file: AuthFile) -> None:
    """Add a person, or change their password. A running page lets them in at once.

    It asks for the password. Without a terminal, the password is the first line of standard input.
    """
    from qwen35mm.chat.accounts import AccountFile, checked_name, checked_password

    checked_name(name)
    is_new = AccountFile(auth_file).add(name, checked_password(_ask_for_password()))
    typer.echo(f"{name} may log in now." if is_new else f"{name} has a new password and is logged out.")


@account.command()
def remove(name: Annotated[str, typer.Argument(help="The person's name.")], auth_file: AuthFile) -> None:
    """Remove a person and log them out. Their conversations stay."""
    from qwen35mm.chat.accounts import AccountFile

    if not AccountFile(auth_file).remove(name):
        raise ConfigError(f"Nobody in {auth_file} is called {name!r}.")
    typer.echo(f"{name} can no longer log in.")


@account.command("list")
def list_names(auth_file: AuthFile) -> None:
    """Show who may log in."""
    from qwen35mm.chat.accounts import AccountFile

    for name in AccountFile(auth_file).names():
        typer.echo(name)


def _ask_for_password() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("Password: ")
    if getpass.getpass("Again: ") != password:
        raise ConfigError("The passwords differ. Nothing was changed.")
    return password
