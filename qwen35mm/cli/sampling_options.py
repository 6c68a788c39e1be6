"""The options of the commands that sample replies, made from the parameters' own description."""

from __future__ import annotations

from dataclasses import asdict, dataclass, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35mm.contract.sampling import NUMBERS, Number


@dataclass(frozen=True)
class _Chosen:
    def values(self) -> dict[str, Any]:
        """Each parameter's value; None if the command line didn't set it."""
        return asdict(self)


def _option(number: Number) -> Any:
    kind = int if number.is_whole else float
    # Typer has no exclusive limits: SamplingParams checks the values.
    option = typer.Option(help=f"{number.help} By default the checkpoint's.", rich_help_panel="Sampling")
    return Annotated[kind | None, option]


if TYPE_CHECKING:
    SamplingChoices = _Chosen
else:
    SamplingChoices = make_dataclass(
        "SamplingChoices",
        [(name, _option(number), None) for name, number in NUMBERS.items() if number.help],
        bases=(_Chosen,),
        frozen=True,
    )
