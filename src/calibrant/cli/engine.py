"""Options for many shards: worker processes, a cluster, and shards that cannot be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from calibrant.cli import shared

if TYPE_CHECKING:
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


@contextmanager
def working(
    workers: int | None = None, dask: str | None = None, unit: str = "examples"
) -> Iterator[None]:
    """Show progress, and use an engine, which is summed up on stderr at the end."""
    from calibrant._core.engines import reporting, use

    if workers is not None and dask is not None:
        raise click.UsageError("--workers and --dask are two engines: name one of them")
    start = time.perf_counter()
    with use(workers=workers, dask=dask) as work:
        if work.dashboard:
            shared.say(f"dashboard: {work.dashboard}")
        with shared.progress_bar(unit) as show:
            progress = Counted(show)
            with reporting(progress):
                yield
    if work.executor is not None:
        seconds = time.perf_counter() - start
        rate = f"{progress.most / seconds:,.0f} {unit} per second"
        shared.say(f"{progress.most:,} {unit} in {seconds:.1f} s on {work.description}: {rate}")


def opened(
    path: str, skip_bad: bool, estimand: str | None = None, cache: str | None = None
) -> Dataset:
    """Open a prediction file; with ``skip_bad`` without its bad shards, which are listed."""
    from calibrant._core.engines import current_work, reporting
    from calibrant.data.dataset import open_dataset
    from calibrant.workflows.shards import describe_skipped, open_good_shards

    if not skip_bad:
        return open_dataset(path, cache=cache)
    chosen: Any = estimand or "auto"  # click's flag values
    progress = current_work().progress
    assert isinstance(progress, Counted)
    with reporting(progress.show):  # its pass over all shards is shown, but bad ones do not count
        data = open_good_shards(path, cache=cache, estimand=chosen)
    for line in describe_skipped(data):
        shared.say(line)
    return data


def opened_each(paths: Sequence[str], skip_bad: bool, skipped: dict[str, str]) -> Iterator[Dataset]:
    """Open several prediction files; with ``skip_bad`` those without any good shard are named.

    Messages on bad shards and files are added to ``skipped``, by path.
    """
    from calibrant.data.shards import NoGoodShard

    bad = 0
    for path in paths:
        try:
            data = opened(path, skip_bad)
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
