"""Run the fuzzer in all processes, until a time or a number of inputs is reached.

    python -m tests.fuzz --minutes 60                      # every target, in all processes
    python -m tests.fuzz --target readers --inputs 100000  # one of them
    python -m tests.fuzz --target readers --seed 12345     # one input again, with its traceback

A failure is printed when it occurs, as the command that reproduces it; so is an input that ends
its process, takes more than two minutes, or more memory than 4 GiB. The exit code is 1 if there
was any.
"""

import argparse
import os
import sys
import time

from tests.fuzz.runner import fuzz
from tests.fuzz.targets import TARGETS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--seed", type=int, help="check this input alone")
    parser.add_argument("--first", type=int, help="the first seed; by default one by the clock")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many; 0 for never")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    if options.seed is not None:
        for target in targets:
            run(target, options.seed)
            print(f"{target} {options.seed}: nothing is wrong")
        return 0
    first = int(time.time()) * 1000 if options.first is None else options.first
    found = fuzz(targets, first, options.processes, options.minutes, options.inputs)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
