"""Networks whose last layer is retrained and replaced."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import calibrant as cal
from calibrant.calibrators.maccal import MaCCal
from calibrant.calibrators.maccal.frozen import _stratified_share, replace_head
from calibrant.calibrators.maccal.masked import MaskedClassifier, masked_step
from tests.support.features import CLASSES, QUICK, WIDTH, logits_by_hand


class Residual(nn.Module):
    """As ResNets are: convolution, batch norm, pooling, ``fc``."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        hidden = F.relu(self.norm(self.conv(images))).mean((-2, -1))
        return self.fc(self.drop(hidden))


class Transformer(nn.Module):
    """As vision transformers of torchvision are, with ``heads.head``; returns a dictionary."""

    def __init__(self, spare=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.heads = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES)})
        if spare:
            self.spare = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return {"logits": self.heads["head"](self.encoder(tokens)[:, 0])}


@pytest.fixture
def images(rng):
    images = torch.tensor(rng.normal(size=(40, 3, 6, 6)), dtype=torch.float32)
    return list(zip(images.split(10), torch.arange(40).remainder(CLASSES).split(10), strict=True))


def test_network_stays_bit_identical_and_its_features_are_learned_from(images):
    network = Residual().train()
    network.norm.eval()  # a mode of its own, to be kept
    before = copy.deepcopy(network.state_dict())
    options = {**QUICK, "batch_size": 10}
    module = MaCCal(**options).fit_model(network, images)
    after = network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (network.training, network.norm.training, network.drop.training) == (True, False, True)
    assert not network.fc._forward_pre_hooks
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    # the same by hand: batches in the order of the loader
    network.eval()
    with torch.no_grad():
        inputs = [F.relu(network.norm(network.conv(x))).mean((-2, -1)) for x, _ in images]
    head = MaskedClassifier(WIDTH, CLASSES, bottleneck=16)
    optimiser = torch.optim.Adam(head.parameters())
    for epoch in range(3):
        optimiser.param_groups[0]["lr"] = 1e-3 * (1 + np.cos(np.pi * epoch / 3)) / 2
        random = torch.Generator().manual_seed(epoch)
        head.keep_.fill_(0.9)
        for features, (_, labels) in zip(inputs, images, strict=True):
            masks = head.draw(random)
            optimiser.zero_grad()
            F.cross_entropy(head(features, masks), labels).backward()
            masked_step(optimiser, head, masks)
    torch.testing.assert_close(module.classifier.first.weight, head.first.weight.detach())


def test_held_out_loader_controls_the_keep_rate(images):
    network = Residual().eval()
    options = {**QUICK, "batch_size": 10}
    module = MaCCal(**options).fit_model(network, images, held_out=images[:2])
    features = cal.collect(network, images[:2], last_layer="fc")[2]
    claimed = module.predict_proba(features).amax(-1).mean()
    assert module.history[-1].confidence == pytest.approx(float(claimed), abs=1e-6)
    with pytest.raises(ValueError, match="at least one batch"):
        MaCCal(**options).fit_model(network, [])
    with pytest.raises(ValueError, match="held_out must have at least one batch"):
        MaCCal(**options).fit_model(network, images, held_out=[])
    wrong = [(images[0][0], images[0][1] + CLASSES)]
    with pytest.raises(ValueError, match=r"in \[0, 4\)"):
        MaCCal(**options).fit_model(network, wrong)
    ignored = [(images[0][0], torch.full((10,), -100))]
    with pytest.raises(ValueError, match="no labelled example in epoch 1"):
        MaCCal(**options).fit_model(network, ignored)


@pytest.mark.parametrize(
    ("network", "example", "layer"),
    [
        (Residual(), torch.randn(3, 3, 6, 6), "fc"),
        (Transformer(), torch.randn(3, 5, WIDTH), "heads.head"),
    ],
)
def test_replaced_layer_predicts_as_the_retrained_classifier(data, network, example, layer):
    network.eval()
    module = MaCCal(**QUICK).fit(*data)
    before = network.state_dict()
    other = replace_head(network, module)
    assert type(other) is type(network)
    assert isinstance(network.get_submodule(layer), nn.Linear)
    assert isinstance(other.get_submodule(layer), MaskedClassifier)
    assert other.get_submodule(layer) is not module.classifier
    assert network.state_dict().keys() == before.keys()
    shared = {id(p) for p in other.parameters()} & {id(p) for p in network.parameters()}
    assert len(shared) == len(list(network.parameters())) - 2
    features = cal.collect(network, [(example, torch.zeros(3).long())], last_layer=layer)[2]
    found = other(example)
    logits = found if isinstance(found, torch.Tensor) else found["logits"]
    torch.testing.assert_close(logits.softmax(-1), module.predict_proba(features))
    # it behaves as the wrapped model, and a copy of the state of one fits the other
    wrapped = cal.calibrated(network, module, last_layer=layer)(example)
    wrapped = wrapped if isinstance(wrapped, torch.Tensor) else wrapped["logits"]
    torch.testing.assert_close(wrapped.softmax(-1), logits.softmax(-1))


class Patches(nn.Module):
    """As vision transformers of timm are: patches, a token for the class, blocks, ``head``."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=True)
        self.blocks = nn.Sequential(layer)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, images):
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1)
        return self.norm(self.blocks(tokens + self.places))[:, 0]

    def forward(self, images):
        return self.head(self.features(images))


def hugging_face_transformer():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **layers))


@pytest.mark.parametrize(
    ("build", "layer", "features_of"),
    [
        (Patches, "head", lambda model, x: model.features(x)),
        (
            hugging_face_transformer,
            "classifier",
            lambda model, x: model.vit(x).last_hidden_state[:, 0],
        ),
    ],
    ids=["timm", "transformers"],
)
@torch.no_grad()
def test_last_layer_of_vision_transformers_is_replaced(tmp_path, build, layer, features_of):
    torch.manual_seed(0)
    network, head = build().eval(), MaskedClassifier(WIDTH, CLASSES, seed=3)
    head.keep_.fill_(0.6)
    before = copy.deepcopy(network.state_dict())
    images = torch.randn(5, 3, 8, 8)

    def logits(model):
        found = model(images)
        return getattr(found, "logits", found)

    plain = logits(network)
    other = replace_head(network, head)
    wanted = logits_by_hand(head, features_of(network, images).double().numpy(), 0.6, 0.6)
    np.testing.assert_allclose(logits(other), wanted, atol=1e-5)
    # all but the last layer is shared, and as it was to the bit; the given model keeps its own
    after = other.state_dict()
    backbone = {name for name in before if not name.startswith(f"{layer}.")}
    assert backbone == {name for name in after if not name.startswith(f"{layer}.")}
    assert all(torch.equal(before[name], after[name]) for name in backbone)
    assert all(after[name].data_ptr() == network.state_dict()[name].data_ptr() for name in backbone)
    assert torch.equal(logits(network), plain)
    # its weights fit another model of the same form
    torch.save(after, tmp_path / "weights.pt")
    again = replace_head(build().eval(), MaskedClassifier(WIDTH, CLASSES))
    assert not torch.allclose(logits(again), logits(other))
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(logits(again), logits(other))


def test_classifier_of_a_vision_transformer_is_trained_saved_and_replaced(images, tmp_path):
    torch.manual_seed(0)
    network = hugging_face_transformer().eval()
    loader = [(F.interpolate(x, 8), y) for x, y in images]
    before = copy.deepcopy(network.state_dict())
    module = MaCCal(**{**QUICK, "batch_size": 10}).fit_model(network, loader)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    cal.save(module, tmp_path / "head")
    network.save_pretrained(tmp_path / "model")
    read = type(network).from_pretrained(tmp_path / "model").eval()
    other = replace_head(read, cal.load(tmp_path / "head"))
    with torch.no_grad():
        features = network.vit(loader[0][0]).last_hidden_state[:, 0]
        found = other(pixel_values=loader[0][0]).logits
    torch.testing.assert_close(found.softmax(-1), module.predict_proba(features))
    assert read.classifier.weight.shape == (CLASSES, WIDTH)


def test_replaced_layer_of_a_half_precision_model_returns_float32(data):
    module = MaCCal(**QUICK).fit(*data)
    network = Residual().to(torch.bfloat16).eval()
    found = replace_head(network, module)(torch.randn(2, 3, 6, 6, dtype=torch.bfloat16))
    assert found.dtype == torch.float32


def test_last_layer_is_found_or_asked_for():
    head = MaskedClassifier(WIDTH, CLASSES)
    with pytest.raises(ValueError, match=r"has several: heads.head \(12 to 4\), spare \(12 to 4\)"):
        replace_head(Transformer(spare=True), head)
    chosen: Any = replace_head(Transformer(spare=True), head, name="spare")
    assert isinstance(chosen.spare, MaskedClassifier)
    assert isinstance(chosen.heads["head"], nn.Linear)
    with pytest.raises(ValueError, match=r"has none: fc \(12 to 4\)"):
        replace_head(Residual(), MaskedClassifier(WIDTH, CLASSES + 1))
    with pytest.raises(ValueError, match=r"no linear layer 'conv'; its last are fc \(12 to 4\)"):
        replace_head(Residual(), head, name="conv")
    with pytest.raises(ValueError, match="maps 9 features to 4 classes, the layer 'fc' maps 12"):
        replace_head(Residual(), MaskedClassifier(9, CLASSES))
    with pytest.raises(TypeError, match="a fitted MaCCal, a MaskedClassifier"):
        replace_head(Residual(), nn.ReLU())
    linear = replace_head(Residual(), nn.Linear(WIDTH, CLASSES))
    assert isinstance(linear.fc, nn.Linear)
    with pytest.raises(ValueError, match="is not fitted"):
        replace_head(Residual(), MaCCal())


def test_layer_with_two_names_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.alias = model[1]
    with pytest.raises(ValueError, match="is also 'alias'"):
        replace_head(model, MaskedClassifier(8, 3))


def test_module_with_a_submodule_called_head_is_inserted_whole():
    class Own(nn.Module):
        width, classes = 8, 3

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, features):
            return 2 * self.head(features)

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    assert isinstance(replace_head(model, Own())[1], Own)  # type: ignore[index]


def test_the_seed_draws_the_share_of_each_class():
    labels = np.repeat([0, 1, 2], [40, 20, 7])
    first, again, other = (_stratified_share(labels, 0.25, seed) for seed in (3, 3, 4))
    assert first.tolist() == again.tolist()
    for label, size in enumerate((10, 5, 2)):
        one, two = (set(part[labels[part] == label].tolist()) for part in (first, other))
        assert len(one) == len(two) == size
        assert one != two
