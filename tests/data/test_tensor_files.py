"""Files of tensors: they are read, and damage and everything else is refused and never run."""

import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant.data import open_dataset, save_predictions

LOGITS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(50) % 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_are_read(tmp_path, dtype):
    logits = LOGITS.to(dtype)
    stored: dict[str, Any] = {"val_logits": logits, "val_labels": LABELS}
    stored |= {
        "test_logits": logits.T.T[::2],
        "test_labels": LABELS[::2],
        "class_names": ["a", "b", "c"],
        "epoch": 3,
    }
    torch.save(stored, tmp_path / "a.pt")
    data = open_dataset(tmp_path / "a.pt")
    assert (data.splits, data.class_names) == (["val", "test"], ["a", "b", "c"])
    for rows in (1, 7, 100):
        chunks = [c for (c,) in data.split("test").shards[0].chunks(rows, ["logits"])]
        np.testing.assert_array_equal(np.concatenate(chunks), logits[::2].float().numpy())
    expected = cal.evaluate(logits, LABELS, level=None)
    measured = cal.evaluate(tmp_path / "a.pt", split="val", level=None)
    assert measured["nll"].value == pytest.approx(expected["nll"].value, rel=1e-12)


class Code:
    """An object that runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def bad_files(folder):
    """Contents of a file, and the error that it gives."""
    code = Code(str(folder / "ran"))
    layer, logits = torch.nn.Linear(3, 2), {"logits": LOGITS, "labels": LABELS}
    yield logits | {"note": code}, "never loaded since it could run any code"
    yield code, "never loaded since it could run any code"
    yield layer, "never loaded"
    yield layer.state_dict(), "no predictions, only weight, bias: if these are the parameters"
    yield {"state_dict": layer.state_dict(), "epoch": 1}, "no predictions, only state_dict, epoch"
    yield LOGITS, "holds a Tensor, a dictionary is wanted"
    yield {"logits": LOGITS.to_sparse()}, "logits is sparse_coo"
    yield {"logits": torch.zeros(1, 1).expand(10**9, 1000)}, r"repeats 4 bytes"
    yield {"logits": LOGITS.to(torch.complex64)}, "real numbers"


@pytest.mark.parametrize("case", range(9))
def test_everything_else_is_refused(tmp_path, case):
    content, message = list(bad_files(tmp_path))[case]
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / "a.pth")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_foreign_files(tmp_path):
    torch.save({"logits": LOGITS}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.pt is damaged or incomplete"):
        open_dataset(tmp_path / "a.pt")
    for content in (b"", b"logits", pickle.dumps(Code(str(tmp_path / "ran")))):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.pt was not written by torch\.save"):
            open_dataset(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:4],
        lambda content: content[:-8],
        lambda content: content + bytes(8),
        lambda content: b"\xff" * 8 + content,
        lambda content: content.replace(b"[20,3]", b"[20,2]"),
        lambda content: content.replace(b"[20,3]", b"[-20,]"),
        lambda content: content.replace(b'"shape"', b'"shapo"', 1),
        lambda content: content.replace(b'"data_offsets":[', b'"data_offsets":[9', 1),
    ],
)
def test_damaged_safetensors(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    save_predictions(path, {"logits": np.eye(20)[:, :3], "labels": np.zeros(20, int)})
    content = path.read_bytes()
    assert open_dataset(path).split().rows == 20
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged or incomplete"):
        open_dataset(path)
