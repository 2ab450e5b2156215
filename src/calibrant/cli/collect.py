"""The verb collect."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.llm import DEVICE, DTYPE, TRUST
from calibrant.cli.shared import FILE, _option, _verb


@_verb()
@click.argument("model", type=FILE)
@click.argument("data", type=FILE)
@_option(
    "--inputs",
    metavar="COLUMN,...",
    help="Columns that the model takes.  [default: inputs; text or pixel_values of Hugging Face]",
)
@_option("--labels", metavar="COLUMN", help="Column of labels.  [default: labels or label]")
@_option("--last-layer", metavar="NAME", help="Also write inputs of this layer as features.")
@_option(
    "--weights",
    type=FILE,
    metavar="FILE",
    help="Weights of package.module:factory, .safetensors.",
)
@_option(
    "--batch",
    "batch_size",
    type=shared.AT_LEAST_1,
    default=32,
    metavar="N",
    help="Examples per batch.",
)
@_option(
    "--length",
    type=shared.AT_LEAST_1,
    metavar="N",
    help="Truncate texts to this number of tokens.  [default: what the model takes]",
)
@DEVICE
@DTYPE
@TRUST
@_option(
    "-o", "--out", type=FILE, required=True, metavar="DIR", help="Folder for a file per shard."
)
@engine._engine_options
def collect(
    model: str,
    data: str,
    inputs: str | None,
    workers: int | str | None,
    out: str,
    **options: Any,
) -> None:
    """Run a classifier over files of inputs, and write its logits.

    MODEL is a Hugging Face classifier of texts or images, a folder or a name on the hub; or
    package.module:factory, where the factory returns a torch module; or a .pt2 file. DATA is a
    file, a folder or a glob: .npz, .npy, .safetensors, .parquet or .arrow; texts also in .csv and
    .jsonl. Labels and other columns are kept. After an interruption, repeat the command: it writes
    the shards that are missing, or whose input or model has changed. Under torchrun, each process
    takes a share of the shards.

    \b
    Examples:
      calibrant collect distilbert-sst2/ 'reviews/*.parquet' -o logits
      calibrant collect package.models:resnet images -o logits
      torchrun --nproc-per-node 8 -m calibrant collect model/ texts -o logits
    """  # noqa: D301
    from calibrant.deploy import collect_shards
    from calibrant.workflows.large import describe_skipped

    sys.path.append(os.getcwd())  # last, so that no file there takes the place of a library
    with engine.InputFiles(workers=workers).working():
        shards = collect_shards(model, data, out, inputs=shared._names_in(inputs), **options)
    for line in describe_skipped(shards.skipped, len(shards.written) + len(shards.kept)):
        shared.say(line)
    shared._say_next(f"{shards.describe()} in {out}; to measure them", "evaluate", out)
