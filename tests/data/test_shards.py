"""Shards in worker processes."""

import os
from typing import Any

import pytest
import torch

from calibrant.data import shards


def test_the_number_of_torch_threads_stays_in_the_home_process(threads):
    threads(3)

    def fails(shard: object, report: object) -> Any:
        assert torch.get_num_threads() == 3
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        shards.in_worker(fails, os.getpid(), None)  # type: ignore[arg-type]
    assert torch.get_num_threads() == 3


def test_a_shard_in_another_process_runs_on_one_torch_thread(threads):
    threads(3)
    work: Any = lambda shard, report: torch.get_num_threads()  # noqa: E731
    assert shards.in_worker(work, os.getpid() + 1, None) == 1  # type: ignore[arg-type]
