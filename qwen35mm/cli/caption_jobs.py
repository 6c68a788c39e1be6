"""Several captioning jobs in one TOML file, whose keys are the command line's option names."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35mm.cli.caption_options import CaptionOptions
from qwen35mm.cli.sampling_options import SamplingChoices
from qwen35mm.errors import CaptioningError
from qwen35mm.option_values import with_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from qwen35mm.captioning.job import Job
    from qwen35mm.settings import ModelOptions

# These hold for all jobs: the model is loaded once.
_FOR_ALL = frozenset(
    {"dry_run", "preview", "open", "take_back", "backend", "backend_key", "remote_video", "ray", "ray_actors"}
)
_SOURCES = "sources"


def is_job_file(sources: list[str]) -> bool:
    """Whether the sources are a file of jobs."""
    return len(sources) == 1 and sources[0].endswith(".toml")


def read_jobs(
    path: Path, model: ModelOptions, options: CaptionOptions, sampling: SamplingChoices
) -> list[tuple[str, Job]]:
    """The jobs of a file with their names, in order. All share one manifest, beside the file unless it is told.

    Args:
        options, sampling: the command line's, which hold where the file says nothing.

    Raises:
        CaptioningError, MissingExtraError, RequestError, ConfigError: the file or a job can't be used.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CaptioningError(f"{path.name} can't be read as jobs: {reason}.") from error
    _refuse_others(content, ("defaults", "job"), path.name)
    defaults, tables = content.get("defaults", {}), content.get("job", [])
    if not isinstance(defaults, dict) or not isinstance(tables, list) or not tables:
        raise CaptioningError(f"{path.name} needs a table [[job]] for each job, and may have one [defaults].")
    options = replace(options, state_dir=options.state_dir or path.parent / ".qwen35mm")
    jobs = []
    for number, table in enumerate(tables, 1):
        name = f"{path.name}, job {number}"
        jobs.append((name, _job({**defaults, **table}, name, model, options, sampling)))
    return jobs


def _job(
    values: Mapping[str, Any], name: str, model: ModelOptions, options: CaptionOptions, sampling: SamplingChoices
) -> Job:
    made: list[tuple[list[str], CaptionOptions, SamplingChoices]] = []

    @with_options
    def collect(
        sources: Annotated[list[str], typer.Argument()], options: CaptionOptions, sampling: SamplingChoices
    ) -> None:
        made.append((sources, options, sampling))

    app = typer.Typer(add_completion=False)
    app.command()(collect)
    command = typer.main.get_command(app)
    known = {
        option.lstrip("-"): parameter
        for parameter in command.params
        if parameter.name not in (*_FOR_ALL, _SOURCES, "help")
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    _refuse_others(values, (_SOURCES, *known), name)
    sources = values.get(_SOURCES, [])
    sources = [sources] if isinstance(sources, str) else sources
    if not sources or not all(isinstance(source, str) for source in sources):
        raise CaptioningError(f"{name} needs sources: a folder or file, or a list of them.")
    arguments = []
    for key, value in values.items():
        if key != _SOURCES:
            arguments += _arguments(known[key], key, value, name)
    try:
        command.main([*arguments, "--", *sources], standalone_mode=False)
    except typer.BadParameter as error:
        raise CaptioningError(f"{name}: {error.format_message()}") from error
    _, chosen, sampled = made[0]
    named = {parameter.name for key, parameter in known.items() if key in values}
    return _over(options, chosen, named).job(list(sources), model, _over(sampling, sampled, named))


def _over(base: Any, chosen: Any, named: Container[str]) -> Any:
    """The base with the values that a job names."""
    return replace(base, **{each.name: getattr(chosen, each.name) for each in fields(base) if each.name in named})


def _arguments(parameter: Any, key: str, value: Any, name: str) -> list[str]:
    """A value as the command line has it."""
    option = f"--{key}"
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise CaptioningError(f"{name}: {key} is true or false; got {value!r}.")
        opposite = parameter.secondary_opts if option in parameter.opts else parameter.opts
        return [option] if value else opposite[:1]
    if isinstance(value, list) and not parameter.multiple:
        raise CaptioningError(f"{name}: {key} takes one value; got a list.")
    return [f"{option}={each}" for each in (value if isinstance(value, list) else [value])]


def _refuse_others(values: Mapping[str, Any], known: tuple[str, ...], name: str) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key.replace("_", "-"), known, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise CaptioningError(f"{name} has no key {key!r}.{meant} Keys are the names of the command's options.")
