"""The command line, one file for each command. Heavy imports wait until a command runs, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer

from qwen35mm.cli.account import account
from qwen35mm.cli.ask import ask
from qwen35mm.cli.caption import caption
from qwen35mm.cli.captions import captions
from qwen35mm.cli.chat import chat
from qwen35mm.cli.desktop import desktop
from qwen35mm.cli.eval import evaluate
from qwen35mm.cli.gates import gates
from qwen35mm.cli.plan import plan
from qwen35mm.cli.review import review
from qwen35mm.cli.serve import serve
from qwen35mm.cli.tune import tune
from qwen35mm.errors import Qwen35mmError

app = typer.Typer(
    name="qwen35mm",
    help="Chat with images and videos on your own machine, with the Qwen3.5 family of models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(chat)
app.command()(desktop)
app.command()(serve)
app.command()(ask)
app.command()(caption)
app.add_typer(captions)
app.command()(review)
app.command()(tune)
app.command()(gates)
app.command("eval")(evaluate)
app.command()(plan)
app.add_typer(account)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is chosen, and why, to stderr."),
) -> None:
    """Options that every command shares."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if version:
        from qwen35mm import __version__

        typer.echo(__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. An error of ours becomes one line and exit code 1.

    Args:
        arguments: None takes those of the process.
    """
    try:
        app(arguments)
    except Qwen35mmError as error:
        typer.echo(f"qwen35mm: {error}", err=True)
        sys.exit(1)
