"""Saved temperature heads."""

import hashlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrant._core.atomic_files import replacing
from calibrant.llm.heads.files import load_head, save_head
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import (
    HEADS,
    make_head,
)
from tests.support.language_models import (
    TINY,
    random_head,
)


def inputs_of(head, generator=0):
    torch.manual_seed(generator)
    width = {"shape": 12}.get(head.wants, 16)
    return torch.randn(2, 5, width)


@pytest.mark.parametrize("kind", HEADS)
def test_round_trip(tmp_path, kind):
    head = random_head(kind)
    figures = {"before": {"nll": 1.5, "auroc": math.nan}}
    fitted = FittedHead(head, TINY, "bce", False, "why", figures, {"seed": 3})
    save_head(fitted, tmp_path / "head")
    again = load_head(tmp_path / "head")
    given = inputs_of(head)
    assert torch.equal(again.head(given), head(given))
    assert type(again.head) is type(head)
    assert (again.fingerprint, again.objective, again.kept, again.reasons) == (
        TINY,
        "bce",
        False,
        "why",
    )
    assert again.settings == {"seed": 3}
    assert again.figures["before"]["nll"] == 1.5
    assert math.isnan(again.figures["before"]["auroc"])


@pytest.mark.parametrize("last", [".json", ".safetensors"])
def test_saving_replaces_as_a_whole(tmp_path, monkeypatch, last):
    (tmp_path / "config.json").write_text("of the model")
    old, new = (FittedHead.from_temperature(t, TINY) for t in (2.0, 3.0))
    save_head(old, tmp_path)
    with monkeypatch.context() as patch:  # killed before one of its files is in place

        def failing(target):
            if target.suffix == last:
                raise KeyboardInterrupt
            return replacing(target)

        patch.setattr("calibrant.llm.heads.files.replacing", failing)
        with pytest.raises(KeyboardInterrupt):
            save_head(new, tmp_path)
    assert load_head(tmp_path).head.bias == old.head.bias
    save_head(new, tmp_path)
    assert load_head(tmp_path).head.bias == new.head.bias
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "config.json"
    assert len(names) == 3  # the weights of the old head are gone
    assert (tmp_path / "config.json").read_text() == "of the model"


def test_saving_refuses(tmp_path):
    head = make_head("linear", width=16)
    head.last.bias.data.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"last\.bias of this LinearHead holds NaN"):
        save_head(FittedHead(head, TINY, "bce"), tmp_path / "head")
    assert not (tmp_path / "head").exists()
    with pytest.raises(FileNotFoundError, match="create it first"):
        save_head(FittedHead.from_temperature(2.0, TINY), tmp_path / "no" / "head")
    with pytest.raises(ValueError, match=r"between 0\.05 and 20"):
        FittedHead.from_temperature(50.0, TINY)


def edited(**changes):
    def change(folder):
        header = json.loads((folder / "head.json").read_text())
        for name, value in changes.items():
            if value is ...:
                del header[name]
            else:
                header[name] = value
        (folder / "head.json").write_text(json.dumps(header))

    return change


def damaged(folder):
    (path,) = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def other_tensor(folder):

    (path,) = folder.glob("*.safetensors")
    save_file({**load_file(path), "more": torch.ones(1)}, path)
    edited(weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited(format=2), "it has format 2.*upgrade"),
        (edited(format="1"), "format from 1"),
        (edited(mark=...), "missing mark"),
        (edited(more=1), "unknown more"),
        (edited(kind="lstm"), "kind 'lstm' is unknown"),
        (edited(config={"width": 16, "units": 3}), "arguments of linear.*unknown units"),
        (edited(config={"width": 8}), "do not fit"),
        (edited(config={"width": "16"}), "does not take its arguments"),
        (edited(config=[]), "must be an object"),
        (edited(mark={"name": "tiny"}), "its mark does not fit"),
        (edited(weights="../head.safetensors"), "it has no file"),
        (damaged, "is not the file"),
        (other_tensor, "tensors: missing nothing, unknown more"),
        (lambda folder: (folder / "head.json").write_text("{"), "is not JSON"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "it has no file"),
    ],
)
def test_loading_refuses(tmp_path, change, message):
    save_head(FittedHead(make_head("linear", width=16), TINY, "bce"), tmp_path)
    load_head(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)
