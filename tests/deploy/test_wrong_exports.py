"""A wrong export is detected, and nothing is written."""

import pytest
import torch

from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.deploy import export
from tests.support.exported import CLASSES, simulated


class Halved(TemperatureScaling):
    """Halves the logits where nobody sees it: in the exported graph."""

    def _transform(self, logits, top, features):
        found = super()._transform(logits, top, features)
        return found / 2 if torch.compiler.is_exporting() else found


class Rounded(TemperatureScaling):
    """Rounds to six digits in the exported graph, which levels near ties and little else."""

    def forward(self, logits, features=None):
        found = super().forward(logits, features)
        return (1e6 * found).round() / 1e6 if torch.compiler.is_exporting() else found


class Step(TemperatureScaling):
    """The temperature is another from a margin on, that in the exported graph is moved."""

    edge, moved = 0.0, 2e-7

    def _temperature(self, logits, top):
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        edge = self.edge + self.moved * torch.compiler.is_exporting()
        return torch.where(first - second > edge, 1.0, 2.0)[..., None]


class Nothing(TemperatureScaling):
    """Gives NaN."""

    def _temperature(self, logits, top):
        return super()._temperature(logits, top) * torch.nan


class Lost(TemperatureScaling):
    """Gives NaN in the exported graph."""

    def _transform(self, logits, top, features):
        found = super()._transform(logits, top, features)
        return found * (torch.nan if torch.compiler.is_exporting() else 1)


class Short(TemperatureScaling):
    """Leaves a class out in the exported graph."""

    def forward(self, logits, features=None):
        found = super().forward(logits, features)
        return found[..., 1:] if torch.compiler.is_exporting() else found


class Moved(Step):
    moved = 0.5


class Steep(TemperatureScaling):
    """The temperature rises from 1 to 1.05 while the margin rises by little."""

    def _temperature(self, logits, top):
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        moved = 1e-7 * torch.compiler.is_exporting()
        return 1 + 0.05 * ((first - second + moved) / 1e-6).clamp(0, 1)[..., None]


def planted(kind):
    data = simulated(300)
    return kind().fit(data["logits"], data["labels"])


@pytest.mark.parametrize(
    ("kind", "suffix", "message"),
    [
        (Halved, ".pt2", r"fails on a batch of \d+: probabilities differ from torch by 0\.\d+, "),
        (Halved, ".onnx", r"ONNX Runtime fails on a batch of \d+: probabilities differ from"),
        (Rounded, ".pt2", "fails on small logits: predicted classes differ from torch"),
        (Moved, ".pt2", "probabilities differ from torch"),
        (Nothing, ".pt2", "the saved program fails on a batch of 1: torch itself gives NaN"),
        (Lost, ".pt2", "fails on a batch of 1: .* differ from torch by inf"),
        (Short, ".pt2", rf"of 1: the shape is \(1, {CLASSES - 1}\), and \(1, {CLASSES}\) with"),
    ],
)
@pytest.mark.usefixtures("operators_read_once")
def test_wrong_export_is_not_written(kind, suffix, message, tmp_path):
    path = tmp_path / f"calibrator{suffix}"
    path.write_text("as before")
    with pytest.raises(ValueError, match=f"nothing was written: .*{message}"):
        export(planted(kind), path)
    assert path.read_text() == "as before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [Step, Steep])
def test_either_side_of_a_step_is_accepted(kind, tmp_path):
    """Where logits are at a step, rounding decides, and no export could do the same."""
    assert export(planted(kind), tmp_path / "calibrator.pt2") <= 1e-5
    found = torch.export.load(tmp_path / "calibrator.pt2").module()
    near = torch.full((1, CLASSES), -3.0)
    near[0, 3:5] = torch.tensor([1.5e-7, 0.0])
    assert (found(near).softmax(-1) - planted(kind)(near).softmax(-1)).abs().max() > 1e-4


def test_tolerance(tmp_path):
    data = simulated(300)
    almost = planted(Halved)
    with pytest.raises(ValueError, match=r"1e-05 is allowed"):
        export(almost, tmp_path / "a.pt2")
    assert export(almost, tmp_path / "a.pt2", tolerance=1.0) > 0.1
    found = torch.export.load(tmp_path / "a.pt2").module()(torch.from_numpy(data["logits"]))
    assert found.shape == (300, CLASSES)


def test_an_early_version_of_torch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ImportError, match=r"PyTorch 2\.7 .* pip install 'calibrant\[export\]'"):
        export(planted(TemperatureScaling), tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())
