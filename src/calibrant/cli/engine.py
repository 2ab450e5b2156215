"""Prediction files of the verbs: the options that say how to read them, and with which engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import COLUMNS, SHARDS, F, _option

if TYPE_CHECKING:
    from calibrant.data.dataset import Dataset

_COLUMNS = (
    _option("--labels", metavar="COLUMN", section=COLUMNS, help="Column of the labels."),
    _option(
        "--probs",
        metavar="COLUMN,...",
        section=COLUMNS,
        help="Columns of probabilities, one for each class; one alone is P(class 1).",
    ),
    _option("--logits", metavar="COLUMN,...", section=COLUMNS, help="Columns of logits, likewise."),
)


def _workers(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    """Return a number of processes as such, and the address of a scheduler as it is."""
    if text is None or ":" in text:
        return text
    if not text.isdecimal():
        raise click.BadParameter(
            f"{text!r} is neither a number of processes nor an address such as tcp://10.0.0.1:8786"
        )
    return int(text)


_WORKERS = _option(
    "--workers",
    callback=_workers,
    metavar="N|ADDRESS",
    section=SHARDS,
    help="Processes that share the shards, 0 for one on each core; or the scheduler of a dask "
    "cluster.",
)
_SKIP_BAD = _option(
    "--skip-bad",
    is_flag=True,
    section=SHARDS,
    help="Leave out shards that cannot be read, and list them.",
)
_CACHE = _option(
    "--cache",
    metavar="DIR",
    section=SHARDS,
    help="Keep the tables behind the fits in this folder, for later runs.",
)


def _engine_options(command: F) -> F:
    """Add the options that choose where shards are worked on, and what becomes of bad ones."""
    return _added(command, _WORKERS, _SKIP_BAD)


def _reads_predictions(
    *, engine: bool = True, skip_bad: bool = True, cache: bool = False
) -> Callable[[F], F]:
    """Add the options of prediction files; the command gets them as one ``source``."""
    options = [*_COLUMNS, *((_WORKERS,) if engine else ()), *((_SKIP_BAD,) if skip_bad else ())]
    options += [_CACHE] if cache else []

    def add(command: F) -> F:
        @wraps(command)
        def with_source(
            *args: Any, labels: str | None, probs: str | None, logits: str | None, **rest: Any
        ) -> Any:
            columns = {"labels": labels, "probs": shared._names_in(probs)}
            columns["logits"] = shared._names_in(logits)
            how = {name: rest.pop(name) for name in InputFiles.OPTIONS if name in rest}
            return command(*args, source=InputFiles(columns, **how), **rest)

        return _added(with_source, *options)  # type: ignore[return-value]

    return add


def _added(command: F, *options: Callable[[F], F]) -> F:
    for each in reversed(options):
        command = each(command)
    return command


@dataclass
class InputFiles:
    """Opens the prediction files of a verb, and starts the engine that works on them."""

    OPTIONS = ("workers", "skip_bad", "cache")

    columns: Mapping[str, Any] = field(default_factory=dict)
    workers: int | str | None = None
    skip_bad: bool = False
    cache: str | None = None
    show: Callable[[int, int], object] | None = None  # progress, while the verb is working

    @property
    def at_scale(self) -> bool:
        """True if there is an option for many shards."""
        return any((self.workers is not None, self.skip_bad, self.cache))

    @contextmanager
    def working(self, unit: str = "examples") -> Iterator[None]:
        """Show progress, and use the engine, which is summed up on stderr at the end."""
        from calibrant._core.engines import use

        start, longest = time.perf_counter(), 0  # examples of the longest pass

        def count(done: int, total: int) -> None:
            nonlocal longest
            longest = max(longest, done)
            show(done, total)

        with use(workers=self.workers) as work:
            if work.dashboard:
                shared.say(f"dashboard: {work.dashboard}")
            with shared._progress_bar(unit) as show, use(progress=count):
                self.show = show
                yield
        if work.executor is not None:
            seconds = time.perf_counter() - start
            rate = f"{longest / seconds:,.0f} {unit} per second"
            shared.say(f"{longest:,} {unit} in {seconds:.1f} s on {work.description}: {rate}")

    def open(self, path: str, estimand: str | None = None) -> Dataset:
        """Open a prediction file; with ``skip_bad`` without its bad shards, which are listed."""
        from calibrant._core.engines import use
        from calibrant.data.files import open_dataset
        from calibrant.workflows.large import describe_skipped, open_good_shards

        if not self.skip_bad:
            return open_dataset(path, cache=self.cache, **self.columns)
        chosen: Any = estimand or "auto"  # click's flag values
        assert self.show is not None
        with use(progress=self.show):  # the pass that finds bad shards is shown, but not counted
            data = open_good_shards(path, cache=self.cache, estimand=chosen, **self.columns)
        for line in describe_skipped(data.skipped, len(data.files)):
            shared.say(line)
        return data

    def open_each(self, paths: Sequence[str], skipped: dict[str, str]) -> Iterator[Dataset]:
        """Open several prediction files; with ``skip_bad`` those without a good shard are named.

        Messages on bad shards and files are added to ``skipped``, by path.
        """
        from calibrant.data.shards import NoGoodShard

        bad = 0
        for path in paths:
            try:
                data = self.open(path)
            except NoGoodShard as problem:
                bad += 1
                if bad == len(paths):
                    raise
                skipped[path] = str(problem)
                shared.say(f"skipped {path}: {problem}")
                continue
            skipped.update(data.skipped)
            yield data
        if bad:
            shared.say(f"skipped {bad:,} of {len(paths):,} files")
