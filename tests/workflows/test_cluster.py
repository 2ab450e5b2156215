"""Faults on a real dask scheduler with two worker processes: nothing lost or counted twice."""

import importlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calibrant
from calibrant import use
from calibrant._core.engines import _ClusterExecutor, _dask_client
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import open_dataset
from calibrant.deploy import collect_shards
from calibrant.workflows.apply import apply_shards
from calibrant.workflows.compare import compare
from calibrant.workflows.fit import fit
from calibrant.workflows.large import open_good_shards
from tests.support.predictions import cut, predictions
from tests.support.shard_tasks import killed_always, rows_after_a_kill, slow_rows

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.slow,
    # raised by the threads of dask when a connection or process ends, as the tests make them do
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ARRAYS = predictions(rows=200, classes=3)


@pytest.fixture(autouse=True)
def time_limit():
    """A cluster without workers waits for new ones, for minutes."""

    def stop(*_):
        raise TimeoutError("the test took longer than three minutes")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(180)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster():
    # A nanny gives up if its worker is killed while it starts: two kills hit two that run.
    few = dask.config.set({"distributed.scheduler.allowed-failures": 1})
    with (
        few,
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, scheduler_port=0
        ) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def executor(cluster):
    with _dask_client(cluster.scheduler_address) as client:
        yield _ClusterExecutor(client)


def test_the_workers_are_described(cluster):
    with use(workers=cluster.scheduler_address) as work:
        assert work.description == f"2 dask workers of {cluster.scheduler_address}"
        assert isinstance(work.executor, _ClusterExecutor)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 0, 20, 50, 90, 130, 170)):
        np.savez(folder / f"{i}.npz", **shard)
    return folder


def wait_for_workers(executor):
    """Workers that were killed are started anew."""
    executor.client.wait_for_workers(2, timeout=120)


def test_figures_equal_those_of_one_array(shards, executor):
    options: dict[str, Any] = {"sample_weight": "importance", "level": None}
    with use(executor=executor):
        found = calibrant.evaluate(shards, **options)
    expected = calibrant.evaluate(ARRAYS, **options)
    assert found.n == expected.n
    assert found.bins.count.tolist() == expected.bins.count.tolist()
    for name in expected:
        assert found[name].value == pytest.approx(expected[name].value, rel=1e-9)
    with use(executor=executor):
        fitted = fit(shards, method="ts")
    np.testing.assert_allclose(
        fitted.temperature_, fit(ARRAYS, method="ts").temperature_, rtol=1e-6
    )
    with use(executor=executor):
        rows = compare(shards, methods=["none", "ts"], level=None).rows
    others = compare(ARRAYS, methods=["none", "ts"], level=None).rows
    for one, other in zip(rows, others, strict=True):
        assert one.evaluation is not None
        assert other.evaluation is not None
        assert one.evaluation["nll"].value == pytest.approx(other.evaluation["nll"].value, rel=1e-6)


def test_a_bootstrap_does_not_depend_on_workers(shards, executor, monkeypatch):
    """Draws are made from the counts of all shards: the intervals are equal, not alike."""
    monkeypatch.setattr("calibrant.metrics.summary.MOST_PAIRS", 50)
    metrics = ["auroc", "aurc"]
    expected = calibrant.evaluate(ARRAYS, metrics=metrics)
    for pool in (None, executor):
        with use(executor=pool):
            assert dict(calibrant.evaluate(shards, metrics=metrics)) == dict(expected)


def test_a_worker_is_killed_and_its_shard_run_again(tmp_path, shards, executor):
    split = open_dataset(shards).split()
    with use(executor=executor):
        results = list(split.walk(partial(rows_after_a_kill, tmp_path), "logits", "labels"))
    assert (tmp_path / "killed").exists()
    sums = [int(shard["labels"].sum()) for shard in cut(ARRAYS, 20, 50, 90, 130, 170)]
    assert results == [(n, total) for n, total in zip([20, 30, 40, 40, 40, 30], sums, strict=True)]
    assert len(list(tmp_path.glob("ran-*"))) > len(sums)  # the shard of the kill ran twice
    wait_for_workers(executor)


def test_models_run_on_the_workers(tmp_path, executor):
    inputs = np.random.default_rng(0).normal(size=(60, 8))
    (tmp_path / "in").mkdir()
    for i in range(4):
        np.savez(tmp_path / "in" / f"{i}.npz", inputs=inputs[15 * i : 15 * (i + 1)])
    arguments = "tests.support.classifiers:linear", tmp_path / "in"
    with use(executor=executor):
        collect_shards(*arguments, tmp_path / "cluster")
    collect_shards(*arguments, tmp_path / "here")
    found, expected = (open_dataset(tmp_path / name).split() for name in ("cluster", "here"))
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-6)


def test_workers_are_killed_from_outside(shards, executor, cluster):
    def kill():
        time.sleep(0.7)
        os.kill(next(iter(cluster.workers.values())).process.process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    split = open_dataset(shards).split()
    with use(executor=executor):
        assert list(split.walk(slow_rows, "labels")) == [20, 30, 40, 40, 40, 30]
    thread.join()
    wait_for_workers(executor)


def test_bad_shards(shards, executor):
    content = (shards / "2.npz").read_bytes()
    (shards / "7.npz").write_bytes(content[:-300])
    np.savez(shards / "8.npz", **predictions(rows=5, classes=4))
    flipped = bytearray(content)
    flipped[200] ^= 255
    (shards / "9.npz").write_bytes(flipped)
    double = {**cut(ARRAYS, 20)[0], "logits": ARRAYS["logits"][:20].astype("float64")}
    np.savez(shards / "10.npz", **double)
    with use(executor=executor):
        data = open_good_shards(shards)
    assert sorted(Path(path).stem for path in data.skipped) == ["7", "8", "9"]
    with use(executor=executor):
        found = calibrant.evaluate(data, level=None)
    rows = np.r_[:200, :20]
    expected = calibrant.evaluate(ARRAYS["logits"][rows], ARRAYS["labels"][rows], level=None)
    assert found.n == expected.n
    assert found["nll"].value == pytest.approx(expected["nll"].value, rel=1e-9)
    (shards / "8.npz").unlink()
    (shards / "7.npz").unlink()
    with pytest.raises(ValueError, match=r"9\.npz is damaged"), use(executor=executor):
        calibrant.evaluate(shards)


def halved():
    calibrator = TemperatureScaling()
    calibrator._store(temperature_=2.0)
    calibrator._set_classes(3)
    return calibrator


def assert_calibrated(folder):
    logits = ARRAYS["logits"] / 2
    found = open_dataset(folder).split()
    np.testing.assert_allclose(found.logits, logits - logits.max(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(found.labels, ARRAYS["labels"])


def test_calibrated_shards(tmp_path, shards, executor):
    with use(executor=executor):
        result = apply_shards(halved(), shards, tmp_path / "out")
    assert result.describe() == "wrote 7 shards"
    assert_calibrated(tmp_path / "out")
    again = apply_shards(halved(), shards, tmp_path / "out")  # receipts of workers are known here
    assert again.describe() == "wrote 0 shards, kept 7 of an earlier run"


def test_a_full_disk_at_a_worker(tmp_path, shards, executor, cluster):
    """Workers may write files of 1500 bytes, as on a disk that is almost full."""
    client = executor.client
    before = client.run(limit_files, 1500)
    try:
        with (
            pytest.raises(OSError, match=r"npz was not written .*run the same again"),
            use(executor=executor),
        ):
            apply_shards(halved(), shards, tmp_path / "out")
    finally:
        client.run(limit_files, next(iter(before.values())))
    with use(executor=executor):
        result = apply_shards(halved(), shards, tmp_path / "out")
    assert "0.npz" in {Path(path).name for path in result.kept}  # which is empty
    assert len(result.kept) + len(result.written) == 7
    assert result.written  # though workers may have gone on with others meanwhile
    assert_calibrated(tmp_path / "out")


def limit_files(size):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return soft


def test_on_the_command_line(shards, cluster, run):
    code, out, err = run(
        "evaluate", shards, "--workers", cluster.scheduler_address, "--level", "0", "--json"
    )
    assert code == 0
    assert f'"n": {calibrant.evaluate(ARRAYS, level=None).n}' in out
    assert re.search(
        r"200 examples in [\d.]+ s on 2 dask workers of tcp://.*: [\d,]+ examples per second", err
    )


def test_a_shard_that_kills_every_worker_is_named(shards, cluster):
    with use(workers=cluster.scheduler_address):
        one = open_dataset(shards / "3.npz").split()
        with pytest.raises(ChildProcessError, match=r"while they worked on .*3\.npz"):
            list(one.walk(killed_always, "labels"))


def test_no_scheduler(shards, run, monkeypatch):
    monkeypatch.setattr("calibrant._core.engines._CONNECT_SECONDS", 0.5)
    code, out, err = run("evaluate", shards, "--workers", "tcp://127.0.0.1:9")
    assert (code, out) == (2, "")
    assert err.startswith("error: no dask scheduler answers at tcp://127.0.0.1:9 (")


def test_workers_and_scheduler_that_go_away(tmp_path, shards):
    """Each run ends with a sentence, and another one finishes its work."""
    split = open_dataset(shards).split()
    with scheduler_process(tmp_path) as started:
        short = dask.config.set({"calibrant.no-workers-timeout": "1s"})
        with short, use(workers=started.address):
            results = split.walk(slow_rows, "labels")
            assert next(results) == 20
            started.worker.kill()
            with pytest.raises(ConnectionError, match="has had no workers for 1 s: start some"):
                list(results)
        quick = dask.config.set({"distributed.comm.timeouts.connect": "2s"})
        with quick, use(workers=started.address):
            kill = threading.Timer(1, started.scheduler.kill)
            kill.start()
            with pytest.raises(ConnectionError, match="the scheduler was lost"):
                list(split.walk(slow_rows, "labels"))
            kill.join()
    result = apply_shards(halved(), shards, tmp_path / "out")
    assert result.describe() == "wrote 7 shards"
    assert_calibrated(tmp_path / "out")


class scheduler_process:
    """A scheduler with one worker, in processes of their own."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        self.file = self.folder / "scheduler.json"
        place = ["--scheduler-file", str(self.file), "--no-dashboard"]
        self.scheduler = started("dask_scheduler", "--port", "0", *place)
        self.worker = started("dask_worker", "--nthreads", "1", "--no-nanny", *place)
        until = time.monotonic() + 60
        while not self.file.exists() and time.monotonic() < until:
            time.sleep(0.1)
        self.address = json.loads(self.file.read_text())["address"]
        return self

    def __exit__(self, *_):
        for process in (self.scheduler, self.worker):
            process.kill()
            process.join()


def started(*command):
    """Start a command of dask in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=command_of_dask, args=command)
    process.start()
    return process


def command_of_dask(name, *arguments):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    module = importlib.import_module(f"distributed.cli.{name}")
    module.main(list(arguments))
