import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import calibrant as cal
from calibrant.integrations.stream import ignore_repeated, total
from tests.support.evaluations import predictions


def loader_of(rank, logits, labels, ranks=2, shuffle=False):
    data = TensorDataset(torch.from_numpy(logits), torch.from_numpy(labels))
    sampler: DistributedSampler = DistributedSampler(
        data, ranks, rank, shuffle=shuffle, drop_last=False
    )
    return DataLoader(data, batch_size=4, sampler=sampler)


@pytest.mark.parametrize("n", [1, 36, 37])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_examples_that_a_sampler_repeats_count_once(rng, n, ranks, shuffle):
    logits, labels = rng.normal(size=(n, 3)), rng.integers(3, size=n)
    stream = cal.Accumulator(level=None)
    for rank in range(ranks):  # stand for processes
        own, loader = stream.like(), loader_of(rank, logits, labels, ranks, shuffle)
        for i, (batch, targets) in enumerate(loader):
            own.update(batch, ignore_repeated(targets, loader, i))
        stream.merge(own)
    result, whole = total(stream), cal.evaluate(logits, labels, level=None)
    assert result.n == n
    np.testing.assert_array_equal(result.bins.count, whole.bins.count)
    assert result["nll"].value == pytest.approx(whole["nll"].value, rel=1e-12)


def test_labels_of_tokens_are_ignored_by_text(rng):
    logits, labels = rng.normal(size=(3, 3)), rng.integers(3, size=(3, 7))
    loader = loader_of(1, logits, labels)
    result = ignore_repeated(torch.from_numpy(labels[[1, 0]]), loader, 0)
    assert (result[1] == -100).all()
    assert result[0].tolist() == labels[1].tolist()


class OtherOrder(BatchSampler):
    pass


@pytest.mark.parametrize("case", ["one process", "flat tokens", "other order", "no loader"])
def test_labels_are_left_alone_where_the_order_is_not_known(rng, case):
    logits, labels = predictions(rng, n=3)
    targets, loader = torch.from_numpy(labels[[1, 0]]), loader_of(1, logits, labels)
    if case == "one process":
        loader = DataLoader(loader.dataset, batch_size=4)
    elif case == "flat tokens":
        targets = torch.cat([targets, targets])
    elif case == "other order":
        batches = OtherOrder(loader.sampler, 4, drop_last=False)
        loader = DataLoader(loader.dataset, batch_sampler=batches)
    assert ignore_repeated(targets, None if case == "no loader" else loader, 0) is targets
