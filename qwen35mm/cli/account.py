"""`qwen35mm account`: who may log in to a page that several people use."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from qwen35mm.errors import ConfigError
from qwen35mm.settings import auth_file_option

account = typer.Typer(name="account", help="Say who may log in to the chat page.", no_args_is_help=True)

AuthFile = Annotated[Path, auth_file_option]


@account.command()
def add(name: Annotated[str, typer.Argument(help="What they are called.")], auth_file: AuthFile) -> None:
    """Add somebody, or give them another password; a page that is served lets them in at once.

    The password is asked for. Where this doesn't run in a terminal, it is the first line of the standard input.
    """
    from qwen35mm.chat.accounts import AccountFile, checked_name, checked_password

    checked_name(name)
    is_new = AccountFile(auth_file).add(name, checked_password(_ask_for_password()))
    typer.echo(f"{name} may log in now." if is_new else f"{name} has another password now, and is logged out.")


@account.command()
def remove(name: Annotated[str, typer.Argument(help="What they are called.")], auth_file: AuthFile) -> None:
    """Take somebody out, who is logged out by that; their conversations stay."""
    from qwen35mm.chat.accounts import AccountFile

    if not AccountFile(auth_file).remove(name):
        raise ConfigError(f"Nobody in {auth_file} is called {name!r}.")
    typer.echo(f"{name} can't log in any more.")


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
        raise ConfigError("The two differ. Nothing was changed.")
    return password
