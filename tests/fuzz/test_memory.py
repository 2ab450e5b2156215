"""Readers take little memory, whatever sizes a file declares."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrant import artifacts
from calibrant.llm import FittedHead
from calibrant.llm.heads.fitted import _make_head
from calibrant.llm.models.huggingface import ModelFingerprint
from calibrant.monitor import Monitor
from tests.fuzz import damage
from tests.fuzz.artifacts import original, saved
from tests.fuzz.tables import write_table
from tests.support.artifacts import rewrite, write_state
from tests.support.calibrators import EVERY_METHOD

SIZES = {
    *(("odds", "knots"), ("gc", "group_count"), ("gc", "partitions"), ("procal", "bins")),
    *(("smart", "hidden"), ("pts", "hidden")),
}
"""Options that tensors have the size of; other numbers take no memory."""
LIMITED = """
import json, sys, time
from calibrant import artifacts
from calibrant.llm.heads.tables import open_table
from tests.fuzz.readers import read
from tests.fuzz.runner import limit_memory

READ = {"data": read, "artifact": artifacts.load, "table": open_table}
files = json.loads(sys.stdin.read())
problems = []
for number, (kind, path) in enumerate(files):
    begin = time.perf_counter()
    try:
        READ[kind](path)
        problems.append(None)
    except ValueError as error:
        problems.append(str(error))
    assert time.perf_counter() - begin < 10, path
    if number == 0:  # after the imports
        limit_memory(400 << 20)
print(json.dumps(problems))
"""


def hostile_arrays(folder):
    """Prediction files of a few bytes, whose headers declare huge arrays."""
    for number, shape in enumerate(damage.SHAPES):
        for dtype in ("<f8", "|S0", "<U0", "|V0", "<U999999999"):
            home = folder / f"npy-{number}-{dtype.strip('<|')}"
            home.mkdir()
            content = damage.npy_header(shape, dtype) + bytes(16)
            (home / "logits.npy").write_bytes(content)
            yield home
            with zipfile.ZipFile(home.with_suffix(".npz"), "w") as archive:
                archive.writestr("logits.npy", content)
            yield home.with_suffix(".npz")
        entry = {"dtype": "F64", "shape": list(shape), "data_offsets": [0, 16]}
        text = json.dumps({"logits": entry}).encode()
        file = folder / f"{number}.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        yield file
    torch.save({"logits": torch.zeros(1).expand(10**12, 3)}, folder / "expanded.pt")
    yield folder / "expanded.pt"


def hostile_configs(folder):
    """Artifacts with one whole number of their config after the other made very large."""
    for kind in EVERY_METHOD:
        about = original(kind).config()
        for name, value in about.items():
            for size in (10**9, 10**30):
                if type(value) is int or (isinstance(value, list) and name == "hidden"):
                    file = folder / f"{kind}-{name}-{size}.safetensors"
                    file.write_bytes(saved(kind))
                    large = [size] * len(value) if isinstance(value, list) else size
                    rewrite(file, metadata=configured({**about, name: large}))
                    yield file, (kind, name) in SIZES
    mark = ModelFingerprint("tiny", 16, 9, "0" * 16, None)
    head = folder / "head.safetensors"
    fitted = FittedHead(_make_head("ats", width=16, attention_heads=2), mark, "bce")
    artifacts.save(fitted, head)
    about = artifacts.read(head).config
    options = {**about["options"], "width": 10**9, "inner": 10**9}
    rewrite(head, metadata=configured({**about, "options": options}))
    yield head, True


def configured(config):
    return lambda before: {**before, "config": json.dumps(config)}


def hostile_states(folder):
    """States of monitors with huge numbers."""
    pairs = np.array([0.9, 0.7]), np.array([1, 0])
    for number, path in enumerate(
        [("settings", "bins"), ("settings", "keep"), ("windows", 0, "number"), ("classes",)]
    ):
        state = Monitor().observe(*pairs).state()
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = 10**9 if path[-1] == "bins" else 10**30
        write_state(folder / f"state-{number}.json", "monitor", state)
        yield folder / f"state-{number}.json"


def hostile_tables(folder):
    """Token tables whose columns or header declare more than there is."""
    for number, shape in enumerate([(10**12, 4), (6, 10**12), (10**30,)]):
        home = folder / f"table-{number}"
        home.mkdir()
        write_table(np.random.default_rng(0), home)
        (home / "shard-00000" / "hidden.npy").write_bytes(damage.npy_header(shape, "<f2"))
        (home / "shard-00000" / "top.npy").write_bytes(damage.npy_header(shape, "<f8"))
        yield home
    home = folder / "table-header"
    home.mkdir()
    write_table(np.random.default_rng(0), home)
    header = json.loads((home / "table.json").read_text())
    (home / "table.json").write_text(json.dumps({**header, "shards": [10**12]}))
    yield home


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
def test_sizes_are_refused_before_memory_is_taken(tmp_path):
    np.savez(tmp_path / "whole.npz", logits=np.zeros((2, 3)))
    cases: list[Any] = [("data", tmp_path / "whole.npz", False)]
    cases += [("data", path, None) for path in hostile_arrays(tmp_path)]
    cases += [("artifact", path, grows) for path, grows in hostile_configs(tmp_path)]
    cases += [("artifact", path, None) for path in hostile_states(tmp_path)]
    cases += [("table", path, True) for path in hostile_tables(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input=json.dumps([(kind, str(path)) for kind, path, _ in cases]),
        cwd=Path(__file__).parents[2],  # whose packages it imports
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    problems = json.loads(done.stdout)
    assert problems[0] is None
    refused = {"data": 0, "artifact": 0, "table": 0}
    for (kind, path, must), problem in zip(cases, problems, strict=True):
        assert problem or not must, path
        refused[kind] += problem is not None
        if kind == "artifact" and must:
            said = ("must have the shape", "does not take the arg", "whole number")
            assert any(words in problem for words in said), problem
    assert refused["data"] > 300
    assert refused["artifact"] >= 2 * len(SIZES) + 1 + 3
