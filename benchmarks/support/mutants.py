"""Plant faults at random in the numerical core, and count those that the tests catch.

    python benchmarks/support/mutants.py 300

mutmut plants the faults; ``[tool.mutmut]`` in pyproject.toml says where, and which tests run. The
first call also runs these tests once, to learn what each reaches. Faults not caught are printed.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

TREE = Path("mutants")
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
RUN = (MUTMUT, "run", "--max-children", "1")
OUTCOMES = {0: "missed", 1: "caught", 33: "no test"}


def main() -> None:
    if not (TREE / "mutmut-stats.json").exists():
        subprocess.run([*RUN, "calibrant._core.probs.*"], check=True)
    drawn = random.Random(0).sample(sorted(codes()), int(sys.argv[1]))
    subprocess.run([*RUN, *drawn], check=True)
    found = {name: codes()[name] for name in drawn}
    for name in (name for name, code in found.items() if code == 0):
        subprocess.run([MUTMUT, "show", name], check=True)
    print(dict(Counter(OUTCOMES.get(code, "stopped") for code in found.values())))


def codes() -> dict[str, int]:
    """Exit code of the tests of each fault."""
    files = (json.loads(path.read_text()) for path in TREE.rglob("*.meta"))
    return {name: code for file in files for name, code in file["exit_code_by_key"].items()}


if __name__ == "__main__":
    main()
