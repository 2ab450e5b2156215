"""Temperature heads fitted to tables with a known truth."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads import fit as fit_module, fitted as fitted_module
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fit import _split_documents, fit_head, options_for
from calibrant.llm.heads.fitted import (
    FittedHead,
    _log_sharpness,
    _make_head,
    _predict_rows,
    token_predictions,
)
from calibrant.llm.heads.modules import GlobalHead, bounded
from calibrant.metrics.clustered import Gain
from tests.support.language_models import (
    TINY,
    memory_table,
    random_head,
    simulated_table,
    tiny_model,
)


@pytest.mark.parametrize("objective", ["nll", "bce", "brier", "selective"])
def test_linear_head_finds_the_truth(objective):
    table = simulated_table()
    alpha: Any = "search" if objective == "selective" else None
    fitted = fit_head(table, "linear", objective, alpha=alpha, epochs=12, batch=256)
    assert fitted.kept, fitted.reasons
    assert fitted.head.kind == "linear"
    score = "nll" if objective == "nll" else "brier"
    figures = fitted.figures
    assert figures["head"][score] < figures["global"][score] < figures["before"][score]
    assert figures["head"]["auroc"] > figures["global"]["auroc"]
    weight = fitted.head.last.weight[0]  # type: ignore[union-attr, index]
    cosine = F.cosine_similarity(weight, torch.tensor([0.8, -0.6, *[0.0] * 14]), dim=0)
    if objective != "selective":  # which pulls elsewhere
        assert float(cosine) > 0.9
    else:
        assert fitted.settings["alpha"] in fit_module._ALPHAS


def test_global_temperature_is_found():
    fitted = fit_head(simulated_table(strength=0), "global", "nll")
    assert fitted.settings["temperature"] == pytest.approx(2.0, rel=0.05)
    assert torch.allclose(fitted.head.bias.exp(), torch.tensor(0.5), rtol=0.05)  # type: ignore[operator]
    assert set(fitted.figures) == {"before", "global"}
    assert not any(p.requires_grad for p in fitted.head.parameters())


@pytest.mark.parametrize("kind", ["linear", "mlp", "shape", "ats"])
def test_global_temperature_is_kept_if_nothing_else_helps(kind):
    table = simulated_table(60, strength=0, seed=3)
    fitted = fit_head(table, kind, "nll", epochs=6, batch=256)
    assert not fitted.kept
    assert fitted.head.kind == "global"
    assert "one temperature is kept" in fitted.reasons
    assert set(fitted.figures) == {"before", "global", "head"}


def test_linear_rate_suits_wide_states():
    fitted = fit_head(simulated_table(160, width=512), "linear", "nll", batch=256)
    assert fitted.kept, fitted.reasons
    assert fitted.settings["epoch"] > 1
    assert fitted.figures["global"]["nll"] - fitted.figures["head"]["nll"] > 0.1


@pytest.mark.parametrize(("mean", "kept"), [(0.05, True), (0.03, False), (-0.05, False)])
def test_kept_by_more_than_two_standard_errors(monkeypatch, mean, kept):
    gain = Gain(mean, 0.02, 12)
    monkeypatch.setattr(fit_module, "paired_gain", lambda *_: gain)
    fitted = fit_head(simulated_table(30), "linear", "nll", epochs=2, batch=128)
    assert fitted.kept is kept
    assert fitted.head.kind == ("linear" if kept else "global")
    way = "lower" if mean > 0 else "higher"
    assert (
        f"is {abs(mean):.2g} {way} than with one temperature, with a standard error of 0.02"
        in fitted.reasons
    )


def test_best_epoch_counts():
    """Steps that are far too long spoil the head, so that the start remains the best."""
    fitted = fit_head(simulated_table(60, strength=0), "mlp", "nll", epochs=3, batch=64, rate=0.1)
    assert not fitted.kept
    assert "no epoch of the mlp head" in fitted.reasons
    assert fitted.figures["head"] == pytest.approx(fitted.figures["global"], rel=1e-5)


def test_global_temperature_has_the_best_score_of_its_kind():
    table = simulated_table()
    told = {name: fit_head(table, "global", name).figures["global"] for name in ("nll", "bce")}
    assert told["nll"]["nll"] < told["bce"]["nll"]
    assert told["bce"]["brier"] < told["nll"]["brier"]


def test_ats_on_documents_of_several_lengths():
    lengths = [3, 7, 1, 5]
    rng = np.random.default_rng(0)
    logits = 2.5 * rng.normal(size=(16, 40))
    records = tabulate(examples(logits, logits.argmax(-1)))
    hidden = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float16)
    table = memory_table(hidden, records, np.repeat(np.arange(4), lengths), TINY)
    head = random_head("ats")
    rows = np.r_[10:16, 0:10]  # in another order of documents
    got = _log_sharpness(head, table, rows, table.records(rows))
    alone = [head(torch.from_numpy(h)[None].float())[0] for h in np.split(hidden, [3, 10, 11])]
    wanted = bounded(torch.cat([*alone[2:], *alone[:2]]))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_heads_are_rarely_kept_by_chance():
    """Over seeds of data without anything to find, even with noise that documents share."""
    kept = [
        fit_head(
            simulated_table(40, 15, strength=0, seed=seed, own=0.7),
            "linear",
            "bce",
            epochs=3,
            batch=128,
            rate=0.01,
            seed=seed,
        ).kept
        for seed in range(20)
    ]
    assert sum(kept) <= 4


def test_ats_finds_what_earlier_tokens_say():
    """The true sharpness of a token depends on the state before it, which only a sequence shows."""
    rng = np.random.default_rng(0)
    documents, each = 150, 24
    n = documents * each
    hidden = rng.normal(size=(n, 16))
    mood = np.sign(rng.normal(size=documents))
    hidden[::each, 0] = 6 * mood  # the first token alone tells
    logits = (3 * rng.normal(size=(n, 40))).astype(np.float32)
    true = np.exp(0.9 * np.repeat(mood, each))[:, None] / 2
    labels = (true * logits + rng.gumbel(size=logits.shape)).argmax(-1)
    table = memory_table(
        hidden, tabulate(examples(logits, labels)), np.repeat(np.arange(documents), each), TINY
    )
    options = {"attention_heads": 2}
    fitted = fit_head(table, "ats", "nll", epochs=12, batch=256, rate=3e-3, options=options)
    assert fitted.kept, fitted.reasons
    assert not fit_head(table, "linear", "nll", epochs=3, batch=256).kept


def test_shape_head_finds_shapes():
    rng = np.random.default_rng(1)
    n = 6000
    logits = rng.normal(size=(n, 40)).astype(np.float32)
    spread = rng.uniform(1, 5, (n, 1)).astype(np.float32)
    labels = (2 * logits + rng.gumbel(size=logits.shape)).argmax(-1)  # whatever the spread
    table = memory_table(
        rng.normal(size=(n, 16)),
        tabulate(examples(spread * logits, labels)),
        np.arange(n) // 20,
        TINY,
    )
    fitted = fit_head(table, "shape", "nll", epochs=8, batch=256)
    assert fitted.kept, fitted.reasons
    gain = fitted.figures["global"]["nll"] - fitted.figures["head"]["nll"]
    assert gain > 0.05


def test_same_seed_same_head():
    table = simulated_table(30)
    first, again = (
        fit_head(
            table,
            "mlp",
            "bce",
            epochs=2,
            batch=128,
            seed=5,
            options={"units": 4},
        )
        for _ in range(2)
    )
    assert first.figures == again.figures
    assert fit_head(table, "mlp", "bce", epochs=2, seed=6).figures != first.figures


def test_the_seed_draws_the_initial_weights():
    """At a learning rate of zero they are the final ones."""
    options: dict[str, Any] = {"epochs": 1, "rate": 0.0, "keep_always": True}
    table, weights = simulated_table(10, 5), []
    for seed in (5, 5, 6):
        head = fit_head(table, "mlp", "nll", seed=seed, **options).head
        weights.append(head.state_dict()["first.weight"])
    first, again, other = weights
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_small_chunks_change_nothing_but_the_order(monkeypatch):
    table = simulated_table(60)
    for module in (fitted_module, fit_module):
        monkeypatch.setattr(module, "_CHUNK", 100)
    monkeypatch.setattr(fit_module, "_ENOUGH", 500)
    fitted = fit_head(table, "linear", "nll", epochs=12, batch=64, rate=0.01)
    assert fitted.kept
    rows = np.concatenate(list(table.document_chunks(np.unique(table.documents), 60)))
    assert rows.tolist() == list(range(len(table)))


def test_documents_go_together_as_padding_allows():
    lengths = np.array([3, 30, 2, 2, 9, 1])
    documents = np.repeat(np.arange(6), lengths)
    records = tabulate(examples(np.eye(3)[documents % 3], documents % 3))
    mark = replace(TINY, vocabulary=3)
    table = memory_table(np.zeros((len(documents), 16)), records, documents, mark)
    found = [set(documents[rows]) for rows in table.document_chunks(np.arange(6), 18)]
    assert found == [{0}, {1}, {2, 3}, {4, 5}]  # 9 + 9 = 18


def test_one_temperature_takes_no_options():
    table = simulated_table(30)
    for wrong in ({"alpha": 0.5}, {"options": {"units": 3}}, {"options": {"over": 5}}):
        with pytest.raises(ValueError, match=r"alpha belongs to|has no option"):
            fit_head(table, "global", "selective", **wrong)
    with pytest.raises(ValueError, match="alpha belongs to"):
        fit_head(table, "linear", "nll", alpha=0.5)
    assert fit_head(table, "global", "selective").objective == "brier"


def test_an_unknown_option_of_a_head_is_named():
    with pytest.raises(ValueError, match="mlp head has no option 'hidden': its options are units"):
        fit_head(simulated_table(30), "mlp", options={"hidden": 3})
    # e^3, with the digits that one reads
    with pytest.raises(ValueError, match=r"option 'caps': did you mean cap\?.*\(default 20\.1\)"):
        fit_head(simulated_table(30), "ats", options={"caps": 5})


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"device 'gpu' cannot be used here .*: try cpu"):
        fit_head(simulated_table(30), "linear", device="gpu")


def test_keep_always_keeps_the_last_epoch():
    table = simulated_table(60)
    paper: dict[str, Any] = {"alpha": 1.0, "epochs": 2, "batch": 64, "rate": 0.5}
    chosen = fit_head(table, "linear", "selective", **paper)
    assert not chosen.kept
    always = fit_head(table, "linear", "selective", keep_always=True, **paper)
    assert always.kept
    assert always.head.kind == "linear"
    assert always.settings["epoch"] == 2
    assert "is kept (keep_always): " in always.reasons
    assert "higher" in always.reasons
    assert "keep_always" not in chosen.reasons
    with pytest.raises(ValueError, match="alpha is an argument of its own"):
        fit_head(table, "linear", "selective", options={"alpha": 0.3})
    assert always.figures["head"]["brier"] > always.figures["global"]["brier"]


def test_split_is_by_document():
    documents = np.repeat(np.arange(53), 7)
    held_out: list[int] = []
    for fold in range(5):
        parts = _split_documents(documents, 3, fold)
        owners = [set(documents[part]) for part in parts]
        assert [len(owner) for owner in owners] == [48 - len(owners[2]), 5, len(owners[2])]
        assert set.union(*owners) == set(range(53))
        held_out += owners[2]
    assert sorted(held_out) == list(range(53))
    first, other = (_split_documents(documents, seed, 0)[2] for seed in (3, 4))
    assert set(documents[first]) != set(documents[other])
    everything = _split_documents(documents, 3, None)
    assert [len(part) for part in everything] == [48 * 7, 5 * 7, 0]


def test_every_document_is_held_out_once():
    """The figures of the folds together are those of heads fitted to the other documents."""
    table = simulated_table(40)
    fitted = fit_head(table, "linear", "nll", epochs=6, batch=128)
    assert fitted.kept
    assert "on 40 held-out documents" in fitted.reasons
    nll = 0.0
    for fold in range(5):
        train, stop, test = _split_documents(table.documents, 0, fold)
        rows = np.sort(np.concatenate([train, stop]))
        temperature = best_sharpness(table.records(rows))
        simple = GlobalHead(start=float(temperature.x[0]))
        nll += _predict_rows(simple, table, test).nll.sum() / len(table)
    assert fitted.figures["global"]["nll"] == pytest.approx(nll, abs=1e-6)
    whole = best_sharpness(table.records())
    assert fitted.settings["temperature"] == pytest.approx(np.exp(-whole.x[0]), rel=1e-4)


def test_one_fold_is_held_out_of_many_documents(monkeypatch):
    table = simulated_table(60)
    crossed = fit_head(table, "linear", "nll", epochs=2, batch=128)
    monkeypatch.setattr(fit_module, "_MAX_CROSS_FITTED", 59)
    single = fit_head(table, "linear", "nll", epochs=2, batch=128)
    assert "on 60 held-out" in crossed.reasons
    assert "on 12 held-out" in single.reasons


def test_progress_counts_epochs():
    told: list[tuple[int, int]] = []
    with cal.use(progress=lambda done, total: told.append((done, total))):
        fit_head(simulated_table(30), "linear", "nll", epochs=2, keep_always=True)
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "lstm"}, "head must be one of"),
        ({"objective": "mse"}, "objective must be one of"),
        ({"batch": 0}, "batch must be a whole number, at least 1, got 0"),
        ({"alpha": 0.1}, "alpha belongs to the selective objective"),
    ],
)
def test_fit_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_head(simulated_table(6, 5), **arguments)


def test_fit_refuses_few_documents():
    with pytest.raises(ValueError, match=r"at least 5 documents are needed.*got 4"):
        fit_head(simulated_table(4, 5))


def test_evaluation_on_training_tables_warns(tmp_path):
    table, other = simulated_table(60), simulated_table(60)
    table.collections, other.collections = ("one", "two"), ("three",)
    fitted = fit_head(table, "global")
    cal.save(fitted, tmp_path / "head")
    again = cal.load(tmp_path / "head")
    for head in (fitted, again):
        with pytest.warns(UserWarning, match="was trained on tokens of this table"):
            token_predictions(table, head)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            token_predictions(other, head)
            token_predictions(table)
            token_predictions(
                simulated_table(60), fit_head(simulated_table(60), "global")
            )  # not known of these


def test_from_texts_to_a_calibrated_model(tmp_path):
    """Texts that the model wrote at temperature 1.6: that is what must be found, and no more."""
    model = tiny_model("Qwen2", vocabulary=101, width=32, spread=0.3)
    torch.manual_seed(0)
    prompts = torch.randint(3, 100, (120, 4))
    how = {"do_sample": True, "top_k": 0, "temperature": 1.6, "eos_token_id": None}
    texts = model.generate(prompts, max_new_tokens=30, **how).tolist()
    documents = [{"input_ids": t, "labels": [-100] * 4 + t[4:]} for t in texts]
    fit = fit_head(collect(model, documents, tmp_path / "table"), "linear", "nll", epochs=4)
    assert not fit.kept, fit.reasons
    assert fit.settings["temperature"] == pytest.approx(1.6, rel=0.05)
    cal.save(fit, tmp_path / "head")
    plain = model(prompts).logits
    with attached(model, cal.load(tmp_path / "head")):
        sharper = model(prompts).logits * fit.settings["temperature"]
    torch.testing.assert_close(sharper, plain, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_ats_head_sees_on_tables_what_it_sees_in_the_model(model, documents, tmp_path):
    table = collect(model, documents, tmp_path, prompts=True)
    torch.manual_seed(0)
    head = _make_head("ats", width=16, attention_heads=2)
    torch.nn.init.normal_(head.get_parameter("last.weight"), std=0.3)
    fitted = FittedHead(head, table.fingerprint, "given")
    claims = token_predictions(table, fitted)
    for number, document in enumerate(documents):
        with attached(model, fitted):
            logits = model(input_ids=torch.tensor(document["input_ids"])[None]).logits[0, :-1]
        kept = torch.tensor(document["labels"])[1:] != -100
        wanted = logits.softmax(-1).amax(-1)[kept]
        np.testing.assert_allclose(claims.confidence[table.documents == number], wanted, rtol=5e-3)


def test_an_ats_head_refuses_tables_without_prompts(model, documents, tmp_path):
    table = collect(model, documents, tmp_path / "plain")
    with pytest.raises(ValueError, match="collect again with prompts=True"):
        fit_head(table, "ats")
    head = FittedHead(_make_head("ats", width=16, attention_heads=2), table.fingerprint, "given")
    with pytest.raises(ValueError, match="collect again with prompts=True"):
        token_predictions(table, head)
    with pytest.raises(ValueError, match="other settings"):
        collect(model, documents, tmp_path / "plain", prompts=True)


def test_ats_is_the_method_of_its_paper_by_default():
    table = simulated_table(30, 5)
    paper = fit_head(table, "ats", epochs=1)
    assert (paper.objective, paper.settings["alpha"]) == ("selective", 0.5)
    assert fit_head(table, "ats", alpha=0.1, epochs=1).settings["alpha"] == 0.1
    assert "alpha" not in fit_head(table, "ats", "nll", epochs=1).settings
    with pytest.raises(ValueError, match="alpha must be a number from 0 to 1 or 'search', got 2"):
        fit_head(table, "ats", alpha=2)


def test_options_of_the_objective_are_those_of_the_fit():
    assert {"attention_heads", "cap", "over", "weighting"} <= {*options_for("ats")}
    assert "over" not in options_for("ats", "bce")
    table = simulated_table(30, 5)
    told = [
        fit_head(table, "linear", "selective", options=options, epochs=2, keep_always=True).figures
        for options in ({}, {"over": 5}, {"weighting": "official"})
    ]
    assert len({one["head"]["nll"] for one in told}) == 3
    with pytest.raises(ValueError, match="the linear head has no option 'over'"):
        fit_head(table, options={"over": 5})
