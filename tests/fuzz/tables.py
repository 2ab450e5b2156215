"""Token tables, documents and questions with damage are refused with ValueError."""

import json
import tempfile
from pathlib import Path

import numpy as np

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import COLUMNS, tabulate
from calibrant.llm.heads.fitted import token_predictions
from calibrant.llm.heads.reading import read_documents
from calibrant.llm.heads.tables import (
    Header,
    _as_half,
    _shard_folder,
    _write_header,
    open_table,
)
from calibrant.llm.models.huggingface import ModelFingerprint
from tests.fuzz import damage

TOKENS, WIDTH, VOCABULARY = 6, 4, 5
DOCUMENTS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"conversations": ["a", "b"]},
    {"instruction": "a", "input": "c", "output": "b"},
    {"prompt": "a", "answer": "b"},
    {"text": "a"},
    "plain",
]


def check(rng: np.random.Generator) -> None:
    """Damage one file of a table, or a file of documents."""
    with tempfile.TemporaryDirectory() as home:
        if rng.random() < 0.4:
            check_documents(rng, Path(home))
        else:
            check_table(rng, Path(home))


def write_table(rng: np.random.Generator, folder: Path) -> None:
    """Write a table of a few tokens, as :func:`calibrant.llm.collect` does."""
    logits = rng.normal(size=(TOKENS, VOCABULARY))
    records = tabulate(examples(logits, rng.integers(VOCABULARY, size=TOKENS)))
    columns = {name: getattr(records, name) for name in COLUMNS}
    columns["documents"] = np.sort(rng.integers(3, size=TOKENS))
    columns["hidden"] = _as_half(rng.normal(size=(TOKENS, WIDTH)))
    _shard_folder(folder, 0).mkdir()
    for name, values in columns.items():
        np.save(_shard_folder(folder, 0) / f"{name}.npy", np.asarray(values))
    mark = ModelFingerprint("tiny", WIDTH, VOCABULARY, "0" * 16, None)
    _write_header(folder, Header(mark, "settings", 3, [TOKENS], False, True))


def check_table(rng: np.random.Generator, folder: Path) -> None:
    write_table(rng, folder)
    files = [folder / "table.json", *sorted(_shard_folder(folder, 0).iterdir())]
    file = files[rng.integers(len(files))] if rng.random() < 0.7 else files[0]
    kind = rng.integers(3)
    if kind == 0:
        file.write_bytes(damage.damaged(rng, file.read_bytes()))
    elif file.suffix == ".json":
        content = damage.edited(rng, json.loads(file.read_text()))
        file.write_text(json.dumps(content))
    else:
        file.write_bytes(damage.random_header(rng) + rng.bytes(int(rng.integers(64))))
    try:
        table = open_table(folder)
        assert len(table) == TOKENS
        assert table.hidden().shape[0] == TOKENS
        with np.errstate(all="ignore"):  # the numbers of a damaged column may be any
            token_predictions(table).figures()
    except ValueError:
        return


def check_documents(rng: np.random.Generator, folder: Path) -> None:
    rows = [DOCUMENTS[i] for i in rng.integers(len(DOCUMENTS), size=int(rng.integers(1, 4)))]
    rows = damage.edited(rng, rows) if rng.random() < 0.7 else rows
    suffix = str(rng.choice([".json", ".jsonl", ".txt"]))
    text = json.dumps(rows)
    if suffix == ".jsonl":
        text = "\n".join(map(json.dumps, rows if isinstance(rows, list) else [rows]))
    content = text.encode()
    if rng.random() < 0.5:
        content = damage.damaged(rng, content)
    if rng.random() < 0.05:
        content = damage.PARTS[rng.integers(len(damage.PARTS))]
    file = folder / f"documents{suffix}"
    file.write_bytes(content)
    try:
        found = read_documents(file)
    except ValueError:
        return
    assert found
