"""The verb export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from calibrant.cli.shared import how_written, say


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "-o", "--out", required=True, metavar="FILE", help="File to write, .onnx or .pt2 (torch)."
)
@click.option("--tokens", is_flag=True, help="Logits are (batch, tokens, classes).")
@click.option("--probabilities", is_flag=True, help="Give probabilities instead of logits.")
@click.option("--opset", type=int, metavar="VERSION", help="Of the ONNX operators.  [default: 20]")
def export(folder: str, out: str, tokens: bool, probabilities: bool, opset: int | None) -> None:
    """Write a saved calibrator as a file that runs without calibrant.

    DIR is a folder that "calibrant fit" wrote. The input of the file is "logits" and its output
    "calibrated", or "probs" with --probabilities. It is tried on many inputs first, and not
    written where it gives other probabilities than the calibrator.

    \b
    Examples:
      calibrant export calibrator -o calibrator.onnx
      calibrant export calibrator -o calibrator.pt2 --tokens
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.deploy import EXPORTS

    suffix = Path(out).suffix
    if suffix not in EXPORTS:
        raise ValueError(f"cannot write {out}: the suffix must be one of {', '.join(EXPORTS)}")
    options: dict[str, Any] = {"tokens": tokens, "probabilities": probabilities}
    if opset is not None:
        if suffix != ".onnx":
            raise click.UsageError(f"--opset is for .onnx files, got {out}")
        options["opset"] = opset
    written = how_written(out)
    difference = EXPORTS[suffix](load(folder), out, **options)
    say(f"{written}; its probabilities differ from the calibrator's by {difference:.0e} at most")
