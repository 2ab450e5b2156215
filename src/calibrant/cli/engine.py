"""Options for many shards: worker processes, a cluster, and shards that cannot be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from calibrant.cli import shared

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from calibrant.data.dataset import Dataset

F = TypeVar("F", bound=Callable[..., Any])

_WORKERS = click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Processes that share the shards; 0: one for each core.",
)
_DASK = click.option(
    "--dask", metavar="ADDRESS", help="Scheduler of a dask cluster that shares the shards."
)
SKIP_BAD = click.option(
    "--skip-bad", is_flag=True, help="Leave out shards that cannot be read, and list them."
)


CACHE = click.option(
    "--cache",
    metavar="DIR",
    help="Keep the tables that fits are made from in this folder, for later runs.",
)


def engine_options(command: F) -> F:
    """Add the options that choose where shards are worked on."""
    return _WORKERS(_DASK(command))


class Counted:
    """A callback that shows progress, and keeps the number of examples of the longest pass."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self.show, self.most = show, 0

    def __call__(self, done: int, total: int) -> None:
        """Show and count."""
        self.most = max(self.most, done)
        self.show(done, total)


class Work(NamedTuple):
    """An executor, None for this process, and a callback for progress."""

    executor: Executor | None
    progress: Counted


@contextmanager
def working(workers: int | None, dask: str | None, unit: str = "examples") -> Iterator[Work]:
    """Yield what a workflow needs; an engine is summed up on stderr at the end."""
    from calibrant._core.engines import open_engine

    if workers is not None and dask is not None:
        raise click.UsageError("--workers and --dask are two engines: name one of them")
    start = time.perf_counter()
    with open_engine(workers, dask) as engine:
        if engine.dashboard:
            shared.say(f"dashboard: {engine.dashboard}")
        with shared.progress_bar(unit) as show:
            progress = Counted(show)
            yield Work(engine.executor, progress)
    if engine.executor is not None:
        seconds = time.perf_counter() - start
        rate = f"{progress.most / seconds:,.0f} {unit} per second"
        shared.say(f"{progress.most:,} {unit} in {seconds:.1f} s on {engine.description}: {rate}")


def opened(
    path: str, skip_bad: bool, estimand: str | None, work: Work, cache: str | None = None
) -> Dataset:
    """Open a prediction file; with ``skip_bad`` without its bad shards, which are listed."""
    from calibrant.data.dataset import open_dataset
    from calibrant.workflows.shards import describe_skipped, open_good_shards

    if not skip_bad:
        return open_dataset(path, cache=cache)
    chosen: Any = estimand or "auto"  # click's flag values
    # its pass over all shards is shown, but bad ones do not count
    examining: Any = {"executor": work.executor, "progress": work.progress.show}
    data = open_good_shards(path, cache=cache, estimand=chosen, **examining)
    for line in describe_skipped(data):
        shared.say(line)
    return data


def opened_each(
    paths: Sequence[str], skip_bad: bool, work: Work, skipped: dict[str, str]
) -> Iterator[Dataset]:
    """Open several prediction files; with ``skip_bad`` those without any good shard are named.

    Messages on bad shards and files are added to ``skipped``, by path.
    """
    from calibrant.data.shards import NoGoodShard

    bad = 0
    for path in paths:
        try:
            data = opened(path, skip_bad, None, work)
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
