"""What the benchmarks share: times and peaks."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable


def timed(
    work: Callable[[], object],
    device: str,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Least time of several calls, until the device has done all of its work."""
    import torch

    def whole() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return min(_times(whole, repeats, clock))


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of a call after one to warm up."""
    work()
    return statistics.median(_times(work, repeats))


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Least time of several calls."""
    return min(_times(work, repeats))


def _times(
    work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    taken = []
    for _ in range(repeats):
        start = clock()
        work()
        taken.append(clock() - start)
    return taken


def peak_beyond_logits(prepare: str, work: str, samples: int, classes: int) -> float:
    """Peak memory of some code beyond its logits, as a share of them, in a process of its own.

    ``work`` sees ``logits`` and ``labels``; ``prepare`` runs before, so that imports and thread
    pools are not what is measured.
    """
    code = f"""
import torch, warnings, calibrant as cal
warnings.simplefilter("ignore")
def memory(field):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(field))
{prepare}
logits, labels = torch.randn({samples}, {classes}), torch.randint({classes}, ({samples},))
open("/proc/self/clear_refs", "w").write("5")  # Linux: forget the peak so far
before = memory("VmRSS")
{work}
print((memory("VmHWM") - before) * 1024 / (logits.numel() * 4))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)
