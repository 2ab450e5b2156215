"""Artifacts with flipped bytes or edited content are refused with ValueError, or say the same."""

import json
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as tensors_of, save as bytes_of

from calibrant import artifacts, decide
from calibrant.artifacts import objects
from calibrant.artifacts.objects import artifact_of
from calibrant.calibrators.registry import TAG_CALIBRATORS
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.rows import AnswerRows
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.gate.fitting import fit_gate
from calibrant.llm.gate.watch import GateWatch
from calibrant.llm.heads.fitted import HEADS, FittedHead, _make_head
from calibrant.llm.models.huggingface import ModelFingerprint
from calibrant.monitor import Monitor
from tests.fuzz import damage
from tests.fuzz.calibrators import quick
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn, drawn_pairs

OTHERS = [
    *["prior", "threshold", "sets", "decision", "answers", "signals", "monitor"],
    *["gate", "gate_watch"],
    *[f"head {kind}" for kind in HEADS],
]
TAGS = [f"tags {name}" for name in TAG_CALIBRATORS]


def check(rng: np.random.Generator) -> None:
    """Damage or edit the artifact of one kind, and load it."""
    names = [*EVERY_METHOD, *TAGS, *OTHERS]
    kind = names[rng.integers(len(names))]
    content = saved(kind)
    edit = rng.random() < 0.6
    changed = edited(rng, content) if edit else damage.damaged(rng, content)
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "artifact.safetensors"
        file.write_bytes(changed)
        try:
            found = artifacts.load(file)
        except ValueError:
            return
    if edit:
        usable(found)
    else:
        assert type(found) is type(original(kind))
        assert content_of(found) == content_of(original(kind))


@cache
def original(kind: str) -> Any:
    """Return a small fitted object of a kind."""
    rng = np.random.default_rng(0)
    first, _, last = kind.partition(" ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if first == "tags":
            logits = rng.normal(size=(60, 3))
            return TAG_CALIBRATORS[last]().fit(logits, (logits > rng.normal(size=(60, 3))) + 0)
        if kind in EVERY_METHOD:
            classes = 2 if EVERY_METHOD[kind].two_classes_only else 3
            logits, labels = drawn(rng, 60, classes)
            head = (np.eye(classes), np.zeros(classes))
            return quick(EVERY_METHOD[kind]).fit(logits, labels, features=logits, head=head)
        if first == "head":
            options: dict[str, Any] = {"attention_heads": 2} if last == "ats" else {}
            mark = ModelFingerprint("tiny", 4, 9, "0" * 16, None)
            return FittedHead(_make_head(last, width=4, **options), mark, "bce")
        pairs = drawn_pairs(rng, 200)
        logits, labels = drawn(rng, 200, 3)
        if kind == "prior":
            return decide.label_shift(original("ts"), logits, old_prior=[0.3, 0.3, 0.4])
        if kind == "threshold":
            return decide.threshold(confidence=pairs[0], outcome=pairs[1], max_error=0.3)
        if kind == "decision":
            return decide.DecisionRule(original("sets"), 3, original("ts"), ["a", "b", "c"])
        if kind == "sets":
            return decide.conformal(logits, labels)
        if kind == "answers":
            return AnswerCalibrator().fit(*pairs)
        if kind == "gate":
            answers = zip(*(values.tolist() for values in pairs), strict=True)
            rows = [{"confidence": c, "correct": bool(right)} for c, right in answers]
            return fit_gate(AnswerRows.of(rows), max_error=0.3, verifier_misses=0.5)
        if kind == "gate_watch":
            watch = GateWatch(original("gate"))
            watch.note([0.5, 0.9], ["a", "b"])
            return watch
        if kind == "signals":
            return SignalCalibrator().fit({"a": pairs[0], "b": pairs[0] ** 2}, pairs[1])
        return Monitor(window=50, keep=2).observe(*pairs)


@cache
def saved(kind: str) -> bytes:
    return objects.packed(artifact_of(original(kind)))


def content_of(obj: Any) -> Any:
    """Return everything that is saved of an object, in a form that compares."""
    artifact = artifact_of(obj)
    tensors = {name: (str(t.dtype), t.tolist()) for name, t in artifact.tensors.items()}
    return artifact.kind, artifact.config, artifact.extra, tensors


def edited(rng: np.random.Generator, content: bytes) -> bytes:
    """Change the metadata or a tensor; the checksum is that of the change."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about, tensors = header["__metadata__"], tensors_of(content)
    part = rng.integers(4)
    if set(tensors) == {"state"}:
        state = damage.edited(rng, json.loads(tensors["state"].numpy().tobytes()))
        tensors["state"] = torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        )
    elif part == 0:
        about["config"] = json.dumps(damage.edited(rng, json.loads(about["config"])))
    elif part == 1:
        about["extra"] = json.dumps(damage.edited(rng, json.loads(about["extra"])))
    elif part == 2:
        about = damage.edited(rng, about)
    elif tensors:
        name = sorted(tensors)[rng.integers(len(tensors))]
        tensors[name] = odd_tensor(rng, tensors[name])
    if isinstance(about, dict) and {"config", "extra"} <= set(about):
        about["sha256"] = objects._digest(about["config"], about["extra"], tensors)
    plain = bytes_of(tensors)
    begin = 8 + int.from_bytes(plain[:8], "little")
    text = json.dumps({"__metadata__": about, **json.loads(plain[8:begin])}).encode()
    return len(text).to_bytes(8, "little") + text + plain[begin:]


def odd_tensor(rng: np.random.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another size, dtype or content."""
    kind = rng.integers(6)
    if kind == 0:
        return tensor.to([torch.float64, torch.float16, torch.int32, torch.bool][rng.integers(4)])
    if kind == 1:
        return torch.cat([tensor.reshape(-1)] * 2)
    if kind == 2:
        return tensor.reshape(-1)[:0]
    changed = tensor.clone().reshape(-1)
    if changed.numel():
        values = [0, 1, -1, 2, 1e-30, 1e30, -1e30, 100] + [
            np.nan,
            np.inf,
        ] * tensor.is_floating_point()
        value = values[rng.integers(len(values))]
        value = value if tensor.is_floating_point() else int(np.clip(value, -(2**31), 2**31))
        if tensor.dtype == torch.bool or tensor.dtype == torch.uint8:
            value = int(value) % 2
        changed[rng.integers(len(changed))] = value
    return changed.reshape(tensor.shape)


def usable(obj: Any) -> None:
    """What was loaded can be described, used and saved again, or says why not."""
    try:
        content = objects.packed(artifact_of(obj))
        assert str(obj)
        if isinstance(obj, torch.nn.Module):
            predict(obj)
    except ValueError:
        return
    objects.unpacked(content)


def predict(obj: Any) -> None:
    """Predict some rows, of as many classes and features as the object says, if not too many."""
    classes, width = obj.classes, getattr(obj, "width", 0)
    if max(classes, width) > 100:
        return
    if isinstance(obj, decide.DecisionRule):
        obj.decide(np.eye(classes))
        return
    features = np.linspace(-1, 1, 5)[:, None] * np.ones(max(width, 1))
    logits = np.linspace(-1, 1, 5)[:, None] * np.arange(classes)
    probs = obj.predict_proba(logits[:, 0] if classes == 1 else logits, features)
    assert not np.isnan(probs).any()
