"""`qwen35mm review`: a page to review the captions of a folder or a file."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.caption import open_captioner
from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import MissingExtraError
from qwen35mm.option_values import with_options
from qwen35mm.settings import ModelOptions

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner
    from qwen35mm.captioning.job import Job

_again = functools.partial(typer.Option, rich_help_panel="Asking again")


@dataclass(frozen=True)
class ReviewOptions:
    """The captions, the page, and how the model is asked for new captions."""

    output: Annotated[
        str, typer.Option(help="Where the captions are: sidecar, sidecar:.EXT, jsonl:FILE or dataset:FOLDER.")
    ] = "sidecar"
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the text files; by default beside their media.")
    ] = None
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the manifest; by default .qwen35mm in --output-dir, in the folder or near the file."
        ),
    ] = None
    port: Annotated[int, typer.Option(help="The page's port; 0 takes a free one.", min=0, max=65_535)] = 7861
    open: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False

    system: Annotated[str, _again(help="A system prompt.")] = ""
    max_tokens: Annotated[int, _again(help="Most tokens of a reply.", min=1)] = 512
    prefix: Annotated[str, _again(help="Text before each caption.")] = ""
    suffix: Annotated[str, _again(help="Text after each caption.")] = ""
    trigger: Annotated[str, _again(help="A word that is put first if the caption lacks it.")] = ""
    one_line: Annotated[bool, _again("--one-line", help="Replace line ends by spaces.")] = False
    backend: Annotated[
        list[str] | None,
        _again(help="Address of an OpenAI-compatible server that answers; may be repeated.", metavar="URL"),
    ] = None
    backend_key: Annotated[str | None, _again(help="The server's key.", envvar="OPENAI_API_KEY", show_envvar=True)] = (
        None
    )


@with_options
def review(
    source: Annotated[Path, typer.Argument(help="Folder of images and videos, or a JSONL file that caption wrote.")],
    model: ModelOptions,
    options: ReviewOptions,
    sampling: SamplingChoices,
) -> None:
    """Review captions in the browser: read, edit, accept, ask again. Runs until Ctrl-C."""
    try:
        from qwen35mm.http.run import run
        from qwen35mm.http.sessions import PageToken
        from qwen35mm.review.app import create_app
        from qwen35mm.review.asking import Asker
        from qwen35mm.review.opening import open_captions
        from qwen35mm.review.training import Training
    except ModuleNotFoundError as error:
        raise MissingExtraError("Reviewing captions", "serve") from error

    asked = CaptionOptions(
        system=options.system,
        max_tokens=options.max_tokens,
        prefix=options.prefix,
        suffix=options.suffix,
        trigger=options.trigger,
        one_line=options.one_line,
        backend=options.backend,
        backend_key=options.backend_key,
        output_dir=options.output_dir,
        state_dir=options.state_dir,
    )

    def open_job() -> Job:
        with quick_imports() if not options.backend else contextlib.nullcontext():
            return asked.job([str(source)], model, sampling)

    def open_model(job: Job) -> contextlib.AbstractAsyncContextManager[Captioner]:
        return open_captioner(job, model, asked)

    (opened,) = open_captions([source], options.output, texts=options.output_dir, state=options.state_dir)
    opened.limits = model.limits
    token = PageToken()
    shown = source if options.output.startswith("sidecar") else options.output.partition(":")[2]

    def line(url: str) -> str:
        if options.open:
            import webbrowser

            webbrowser.open(token.address_for_once(url))
        return f"qwen35mm shows the captions of {shown} on {token.address(url)}"

    with contextlib.closing(opened):
        # Records don't say which of their captions are accepted.
        chooses = options.output.startswith("sidecar") and source.is_dir()
        training = Training(_training_command(source, model, options), chooses=chooses)
        app = create_app(opened, Asker(open_job, open_model), training=training, token=token)
        run(app, host="127.0.0.1", port=options.port, line=line)


def _training_command(source: Path, model: ModelOptions, options: ReviewOptions) -> list[str]:
    """The words of the command that trains on the captions of this page, with an adapter beside them."""
    kind, _, target = options.output.partition(":")
    captions = source if kind == "sidecar" or not target else Path(target)
    place = captions.resolve()
    parent = place.parent if captions.name in ("", "..") else captions.parent
    out = parent / f"{place.name if place.is_dir() else place.stem}-adapter"
    words = ["qwen35mm", "tune", str(captions), "--out", str(out)]
    words += ["--model", model.model] if model.model else []
    words += ["--output", options.output] if kind == "sidecar" and target else []
    words += ["--output-dir", str(options.output_dir)] if kind == "sidecar" and options.output_dir else []
    words += ["--system", options.system] if options.system else []
    return words
