"""Shards in worker processes."""

import os

import pytest
import torch

from calibrant.data import shards


def test_the_number_of_torch_threads_stays_in_the_home_process(threads):
    threads(3)

    def fails(shard, report):
        assert torch.get_num_threads() == 3
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        shards._in_worker(fails, os.getpid(), None)  # type: ignore[arg-type]
    assert torch.get_num_threads() == 3


def test_a_shard_in_another_process_runs_on_one_torch_thread(threads):
    threads(3)
    elsewhere = os.getpid() + 1
    count = shards._in_worker(
        lambda shard, report: torch.get_num_threads(),
        elsewhere,
        None,  # type: ignore[arg-type]
    )
    assert count == 1
