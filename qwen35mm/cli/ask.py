"""`qwen35mm ask`: one question with its media, and one streamed answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.cli.early_digest import begin_digest
from qwen35mm.cli.folders import cache_folder
from qwen35mm.cli.loading import shown_loading
from qwen35mm.cli.quick_imports import quick_imports
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import RequestError
from qwen35mm.option_values import with_options
from qwen35mm.settings import DEMO_NOTE, ModelOptions

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.contract import CacheReport, GenerationRequest, Progress, Result, ToolCall

logger = logging.getLogger(__name__)

PHASES = {
    "load": "Loading the model",
    "wait": "Waiting in the queue",
    "read": "Reading media",
    "encode": "Encoding media",
    "prefill": "Reading the prompt",
}


@with_options
def ask(
    options: ModelOptions,
    sampling: SamplingChoices,
    question: Annotated[str, typer.Argument(help="The question; '-' reads it from standard input.")],
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the reply.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Make a sampled reply repeatable.", min=0)] = None,
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Think before the answer; by default as the checkpoint does."),
    ] = None,
    thinking_budget: Annotated[int | None, typer.Option(help="Most tokens of thinking; 0 is none.", min=0)] = None,
    mcp_config: Annotated[
        Path | None, typer.Option(help="JSON file with MCP servers whose tools may be called; each call is asked for.")
    ] = None,
    allow_tool: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A tool that runs without asking; may be repeated.")
    ] = None,
    max_calls: Annotated[int, typer.Option(help="Most calls of tools.", min=1)] = 20,
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer satisfies.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Ask one question, with or without images and videos."""
    if options.weights in ("int8", "int4"):
        # The key of weights that are kept.
        begin_digest(options.source, cache_folder(options))
    with quick_imports():
        import qwen35mm.backends.local
        import qwen35mm.model_library  # noqa: F401
        from qwen35mm.backends.scripting import loop
        from qwen35mm.backends.scripting.functions import calls_to_run, run_calls
        from qwen35mm.contract import GenerationRequest, Image, Message, Text, Video

    json_schema = None if schema is None else _read_schema(schema)
    media = [Image(_file(path)) for path in image or []]
    media += [Video(_file(path)) for path in video or []]
    text = sys.stdin.read() if question == "-" else question
    messages = [Message("system", (Text(system),))] if system else []
    messages.append(Message("user", (*media, Text(text))))

    consent = Consent(set(allow_tool or ()), max_calls, can_ask=_is_asked_at_a_terminal() and not as_json)
    with contextlib.ExitStack() as stack:
        servers = decoders = None
        if mcp_config is not None:
            from qwen35mm.backends.scripting.mcp_tools import McpTools
            from qwen35mm.decoding import Decoders

            servers = stack.enter_context(McpTools(_file(mcp_config), approve=consent))
            # What a tool shows is untrusted: it is read in other processes.
            decoders = stack.enter_context(contextlib.closing(Decoders(options.limits)))
        with shown_loading() as progress:
            backend = options.load(progress=progress, decoders=decoders)
        stack.callback(backend.close)
        if backend.is_demo and not as_json:
            typer.echo(DEMO_NOTE, err=True)
        params = backend.loaded.generation.with_overrides(
            max_tokens=max_tokens,
            seed=seed,
            thinking_budget=thinking_budget,
            json_schema=json_schema,
            **sampling.values(),
        )
        try:
            tools = [] if servers is None else servers.tools()
            # With tools the next round continues this one; none of it needs a disk.
            retain = "memory" if tools else "shared"
            request = GenerationRequest(messages, params, enable_thinking=think, retain=retain, tools=tools)
            result = asyncio.run(_answer(backend, request, quiet=as_json))
            while calls := calls_to_run(result, tools):
                consent.take(len(calls))
                made = Message("assistant", result.text, result.reasoning, calls)
                messages += [made, *(each.message for each in run_calls(calls, tools, loop.run))]
                result = asyncio.run(_answer(backend, replace(request, messages=messages), quiet=as_json))
        except (KeyboardInterrupt, typer.Abort):
            typer.echo("\nStopped.", err=True)
            raise typer.Exit(130) from None
    logger.info(_describe_cache(result.num_prompt_tokens, result.cache))
    if as_json:
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    elif result.finish_reason == "length":
        typer.echo("(The reply was cut off at its limit of tokens.)", err=True)


def _is_asked_at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _file(path: Path) -> Path:
    """The path, if it is a file. Checked before the model is loaded."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file '{path}'.")
    return path


def _read_schema(path: Path) -> str:
    """The schema's text, checked before the model is loaded."""
    from qwen35mm.captioning.texts.json_schema import JsonSchema
    from qwen35mm.engine import check_json_schema

    text = JsonSchema.read(path).text
    check_json_schema(text)
    return text


class Consent:
    """Asks at the terminal before a tool is called, until "always" for this tool.

    Args:
        allowed: names of tools that need no question.
        max_calls: of the whole answer.
        can_ask: whether somebody is at the terminal; nobody's answer is no.
    """

    def __init__(self, allowed: set[str], max_calls: int, *, can_ask: bool) -> None:
        self._allowed = allowed
        self._left = self._max_calls = max_calls
        self._can_ask = can_ask

    def take(self, num_calls: int) -> None:
        """Raises RequestError: the calls are more than may be."""
        self._left -= num_calls
        if self._left < 0:
            raise RequestError(f"The model called tools more than {self._max_calls} times. Allow it with --max-calls.")

    def __call__(self, call: ToolCall) -> bool:
        arguments = json.dumps(dict(call.arguments), indent=2)
        typer.echo(f"\nThe model calls {call.name}: {arguments}", err=True)
        if call.name in self._allowed:
            return True
        if not self._can_ask:
            typer.echo(f"Not run, since nobody can be asked. --allow-tool {call.name} allows it.", err=True)
            return False
        try:
            answer = typer.prompt("Run it? [y]es, [n]o, [a]lways this tool", default="n", err=True).strip().lower()
        except typer.Abort:
            # An Exception would be the call's result.
            raise KeyboardInterrupt from None
        if answer in ("a", "always"):
            self._allowed.add(call.name)
        return answer in ("y", "yes", "a", "always")


async def _answer(backend: LocalBackend, request: GenerationRequest, *, quiet: bool) -> Result:
    from qwen35mm.contract import Finished, MediaPlanned, Progress, TextDelta
    from qwen35mm_preprocess.say import english

    terminal = _Terminal(quiet=quiet)
    async for event in backend.stream(request):
        if isinstance(event, Progress):
            terminal.progress(event)
        elif isinstance(event, MediaPlanned):
            for note in (*(note for plan in event.plans if plan for note in plan.notes), *event.warnings):
                terminal.note(english(note))
        elif isinstance(event, TextDelta):
            terminal.text(event.text, thinking=event.channel == "reasoning")
        elif isinstance(event, Finished):
            terminal.end()
            return event.result
    raise AssertionError("a stream ends with Finished or an error")


def _describe_cache(num_prompt_tokens: int, cache: CacheReport) -> str:
    tiers = "".join(f", {count:,} from {tier}" for tier, count in cache.cached_from.items() if count)
    missed = f", no more because of {cache.miss}" if cache.miss else ""
    evicted = f", without {cache.num_evicted_tokens:,} tokens' keys and values" if cache.num_evicted_tokens else ""
    return (
        f"{cache.num_cached_tokens:,} of {num_prompt_tokens:,} prompt tokens were in the cache{tiers}{missed}; "
        f"{cache.num_encoded_units} vision units encoded, {cache.num_cached_units} in the cache; "
        f"{cache.prefill_s:.2f} s for the prompt, {cache.decode_s:.2f} s for the reply, "
        f"{cache.cache_bytes / 2**20:,.1f} MiB held{evicted}"
    )


class _Terminal:
    """Writes the answer to stdout and everything else to stderr; progress only to a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._show_progress = sys.stderr.isatty() and not quiet
        self._progress_width = 0
        self._thinking = False
        self._any_text = False

    def progress(self, event: Progress) -> None:
        if self._show_progress:
            line = f"{PHASES[event.phase]} {event.done}/{event.total}"
            sys.stderr.write(f"\r{line:<{self._progress_width}}")
            sys.stderr.flush()
            self._progress_width = len(line)

    def note(self, text: str) -> None:
        self._clear_progress()
        if not self._quiet:
            typer.echo(f"Note: {text}", err=True)

    def text(self, text: str, *, thinking: bool) -> None:
        if self._quiet:
            return
        self._clear_progress()
        if thinking:
            typer.secho(text, dim=True, nl=False, err=True)
        else:
            if self._thinking:
                typer.echo("\n", err=True)
            typer.echo(text, nl=False)
            self._any_text = True
        self._thinking = thinking

    def end(self) -> None:
        self._clear_progress()
        if self._any_text:
            typer.echo()

    def _clear_progress(self) -> None:
        if self._progress_width:
            sys.stderr.write(f"\r{' ' * self._progress_width}\r")
            self._progress_width = 0
