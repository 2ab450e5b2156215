"""Time of the search for subgroups, in that of ``evaluate``, and memory, against the examples.

    python benchmarks/slices.py                     # about two minutes

Shards of 50,000 examples of two classes with ten columns are written to a temporary folder. Both
read them in the same run, in this process. Memory is the largest growth of the process while the
search runs. Linux only.
"""

import os
import tempfile
import time
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import numpy as np

import calibrant as cal
from calibrant import use

SHARD = 50_000
SIZES = (100_000, 300_000, 1_000_000)


def write_shard(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = {f"x{i}": rng.normal(size=SHARD) for i in range(7)}
    columns["site"] = rng.choice(list("ABCDEFGH"), SHARD)
    columns["device"] = rng.choice([f"d{i}" for i in range(40)], SHARD)
    columns["age"] = rng.integers(18, 90, SHARD)
    probs = rng.beta(0.6, 2, SHARD)
    wrong = (columns["age"] < 36) & (columns["site"] == "B")
    labels = rng.uniform(size=SHARD) < np.where(wrong, 0.8 * probs, probs)
    np.savez(path, probs=probs, labels=labels.astype(np.int8), **columns)


def held() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def measured(folder: str, size: int) -> str:
    """Line of the table for the shards that were written."""
    cal.evaluate(folder, level=None)  # files are in the cache afterwards
    start = time.perf_counter()
    cal.evaluate(folder, level=None)
    middle = time.perf_counter()
    memory = [held()]
    with use(progress=lambda *_: memory.append(held())):
        found = cal.find_slices(folder)
    search, usual = time.perf_counter() - middle, middle - start
    growth, worst = (max(memory) - memory[0]) / 1e6, found[0].name if len(found) else "-"
    return (
        f"{size:9,}  {found.searched:10,}  {usual:10.2f}  {search:8.2f}  {search / usual:5.1f}  "
        f"{growth:9.0f}  {worst}"
    )


def main() -> None:
    print("examples    subgroups  evaluate s  search s  ratio  memory MB  worst")
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            for number in range(written, size // SHARD):
                write_shard(Path(folder) / f"{number}.npz", number)
            written = size // SHARD
            print(measured(folder, size), flush=True)


if __name__ == "__main__":
    main()
