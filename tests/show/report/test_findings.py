"""Findings by known truth: data that were simulated with a fault show it, others do not."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy

import calibrant as cal
from calibrant.metrics.intervals import Estimate
from calibrant.show.report import report
from calibrant.show.report.findings import MISCALIBRATED, _findings_of
from calibrant.show.report.verdict import _verdict_of
from calibrant.workflows.effect import LossReduction
from tests.show.report.conftest import drawn


def codes(data, **options):
    return {f.code: f for f in report(data, **{"methods": [], **options}).findings}


def test_over_confidence_is_found_where_it_is(over_confident):
    found = {f.code: f for f in over_confident.findings}
    assert {"CAL001", "CAL003", "CAL004", "CAL006", "CAL014"} <= set(found)
    assert not {"CAL002", "CAL007", "CAL010", "CAL013", "CAL015"} & set(found)
    assert found["CAL001"].severity == "bad"
    assert found["CAL014"].severity == "good"
    assert over_confident.verdict.answer == "No"
    assert over_confident.findings[0].severity == "bad"


def test_a_single_range_is_not_found_beside_the_average_over_all():
    found = codes({"logits": drawn(40)["logits"] + [9, 0, 0, 0, 0], "labels": drawn(40)["labels"]})
    assert "CAL001" in found
    assert "CAL004" not in found


def test_under_confidence_is_found():
    found = codes(drawn(factor=0.4))
    assert "CAL002" in found
    assert not {"CAL001", "CAL003", "CAL015"} & set(found)


def test_calibrated_data_are_trusted(calibrated):
    assert {f.code for f in calibrated.findings} == {"CAL015"}
    assert calibrated.verdict.answer == "Yes"


def test_calibrated_data_rarely_have_findings():
    """Six families of tests at 5 % each: most data sets have none, and serious ones are rare."""
    alarms = {"CAL001", "CAL002", "CAL003", "CAL004", "CAL005", "CAL009"}
    results = [codes(drawn(1000, seed=s), level=None) for s in range(40)]
    found = [[f for f in result.values() if f.code in alarms] for result in results]
    assert sum(map(bool, found)) <= 12
    assert not any(f.severity == "bad" for each in found for f in each)


def test_few_examples_are_said_to_be_few():
    result = report(drawn(60), methods=[])
    assert "CAL007" in {f.code for f in result.findings}
    assert result.verdict.answer == "Too few examples to tell"


def test_a_class_that_is_off_is_named_among_others_that_are_not():
    data = drawn(4000)
    wrong = (data["logits"].argmax(-1) == 2) & (np.arange(4000) % 3 == 0)
    data["labels"] = np.where(wrong, 4, data["labels"])
    found = codes(data, level=None)
    assert "class 2 (too high by" in found["CAL005"].evidence
    assert "1 of 5 classes" in found["CAL005"].evidence


def test_a_subgroup_that_is_off_is_named():
    honest, other = drawn(800), drawn(800, factor=4.0, seed=1)
    data = {key: np.concatenate([honest[key], other[key]]) for key in honest}
    found = codes({**data, "place": np.repeat(["north", "south"], 800)}, by="place")
    assert "1 of 2 subgroups by place" in found["CAL006"].evidence
    assert "south" in found["CAL006"].evidence
    assert "north" not in found["CAL006"].evidence


def test_confidence_that_does_not_rank_is_found():
    rng = np.random.default_rng(0)
    right = rng.random(2000) < 0.7
    p = np.clip(0.7 + 0.02 * rng.normal(size=2000), 0.51, 0.9)
    probs = np.stack([p, 1 - p], -1)
    found = codes({"probs": probs, "labels": (~right).astype(int)})
    assert found["CAL008"].severity == "warn"


def test_a_preferred_class_is_found():
    data = drawn(3000)
    data["logits"] = data["logits"] + np.array([1.5, 0, 0, 0, 0])
    found = codes(data, level=None)
    assert re.match(r"\d of 5 classes: class 0 \(mean probability", found["CAL009"].evidence)


def test_shuffled_labels_and_training_sets_come_first():
    data = drawn(2000, factor=3.0)
    shuffled = {**data, "labels": np.random.default_rng(1).permutation(data["labels"])}
    assert codes(shuffled, level=None)["CAL010"].severity == "bad"
    assert report(shuffled, methods=[], level=None).verdict.answer == "Check the data first"
    trained = {"logits": 30 * np.eye(5)[data["labels"]], "labels": data["labels"]}
    assert "CAL010" in codes(trained, level=None)


def test_probabilities_in_place_of_logits_are_found():
    e = np.exp(drawn(500)["logits"])
    data = {"logits": e / e.sum(-1, keepdims=True), "labels": drawn(500)["labels"]}
    assert "look like probabilities" in codes(data, level=None)["CAL010"].evidence


def test_probabilities_of_zero_and_one_are_found():
    labels = np.arange(400) % 3
    probs = np.eye(3)[np.where(np.arange(400) < 40, (labels + 1) % 3, labels)]
    found = codes({"probs": probs, "labels": labels}, level=None)
    assert "40 labels have a probability of 0" in found["CAL011"].evidence
    assert "100.0 % of the answers" in found["CAL012"].evidence
    assert "10.0 % are wrong" in found["CAL012"].evidence


def test_a_single_split_is_cross_fitted_and_all_figures_are_about_the_same_examples():
    made = report(drawn(150, factor=3.0), methods=["none", "ts"], seed=3)
    (subject,) = made.subjects
    assert "5 folds, seed 3" in {f.code: f for f in made.findings}["CAL013"].evidence
    remedy = subject.remedy
    assert remedy is not None
    assert remedy.before is not None
    assert remedy.after is not None
    assert remedy.before.to_dict() == subject.evaluation.to_dict()
    assert remedy.after.n == subject.evaluation.n == 150
    assert remedy.coverage[-1].coverage == 1


def test_the_gain_is_that_of_pairs_of_losses_out_of_fold():
    data = drawn(400, factor=3.0)
    remedy: Any = report(data, methods=["none", "ts"]).subjects[0].remedy
    fitted = cal.workflows.fit.cross_fit(data, method="ts")
    rows = np.arange(400), data["labels"]
    after = np.zeros(400)
    for i, one in enumerate(fitted.calibrators):
        here = fitted.folds == i
        logs = one.transform(data["logits"][here].astype(float))
        after[here] = -scipy.special.log_softmax(logs, -1)[np.arange(here.sum()), rows[1][here]]
    gain = -scipy.special.log_softmax(data["logits"], -1)[rows] - after
    assert remedy.gain.value == pytest.approx(gain.mean(), rel=1e-6)
    reach = scipy.stats.t.ppf(0.95, 399) * gain.std(ddof=1) / 20
    assert remedy.gain.low == pytest.approx(gain.mean() - reach, rel=1e-6)
    assert remedy.gain.high == pytest.approx(gain.mean() + reach, rel=1e-6)


def test_calibration_that_gains_no_more_than_noise_is_not_said_to_help():
    found = [codes(drawn(150, seed=s), methods=["none", "ts"]) for s in range(20)]
    assert sum("CAL014" in each for each in found) <= 2
    assert all(("CAL014" in each) + ("CAL019" in each) + ("CAL015" in each) == 1 for each in found)


def test_changed_predictions_are_named():
    data = drawn(600)
    data["logits"] = data["logits"] + np.array([3.0, 0, 0, 0, 0])
    found = codes(data, methods=["none", "vector"], keep_argmax=False)
    assert re.search(
        r"Accuracy rises from \d.*: the predictions of \d+ of 600", found["CAL014"].evidence
    )


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        (0.7636, "stays at 76.4 %; the"),
        (0.7640, "stays at 76.4 %; the"),
        (0.7590, "falls from 76.4 % to 75.9 %: the"),
        (0.7790, "rises from 76.4 % to 77.9 %: the"),
    ],
)
def test_a_change_of_accuracy_is_named_only_where_its_digits_show_it(
    over_confident, accuracy, words
):
    remedy = over_confident.subjects[0].remedy
    rows = []
    for row in remedy.comparison.rows:
        value = 0.7640 if row.method == "none" else accuracy
        metrics = {**row.evaluation.metrics, "accuracy": Estimate(value, 0.7, 0.8)}
        evaluation = replace(row.evaluation, metrics=metrics)
        rows.append(replace(row, evaluation=evaluation, argmax_changed=153))
    changed = replace(remedy, comparison=replace(remedy.comparison, rows=rows))
    said = f"Accuracy {words} predictions of 153 of 1,500 examples change."
    assert changed.price("examples") == said


def test_no_fix_is_a_calibrator_where_none_clearly_helps():
    """Over-confident models of 150 rows: some findings are beyond noise, the gain is not."""
    seen = set()
    for seed in (2, 4, 7, 19):
        made = report(drawn(150, classes=2, factor=1.6, seed=seed), methods=["none", "ts"])
        found = {finding.code: finding for finding in made.findings}
        assert made.verdict.answer == "Not quite"
        assert "CAL019" in found
        seen |= set(found)
        page = made.to_markdown()
        assert not re.search("Calibrate|calibrant fit|would allow a yes", page)
        assert "**What fixes it:** Label more examples, then look again." in page
        said = [fix for fix in re.findall(r"Label about ([\d,]+) more examples", page)]
        assert len(set(said)) <= 1
        assert found["CAL007"].severity == "info"
    assert {"CAL001", "CAL003", "CAL004"} <= seen
    assert "Over all examples that is within noise (p = 0.05), but not everywhere" in page


def test_the_advised_calibrator_is_not_said_to_keep_predictions_that_it_changes():
    data = drawn(600, classes=2, factor=3.0)
    data["logits"] = data["logits"] + np.array([3.0, 0.0])
    made = report(data, methods=["none", "auto"])
    remedy = made.subjects[0].remedy
    assert remedy is not None
    assert remedy.chosen is not None
    assert remedy.chosen.argmax_changed
    page = made.to_html()
    assert f"the predictions of {remedy.chosen.argmax_changed} of 600 examples change" in page
    assert "predicted classes can stay" not in page
    assert "add --set keep_argmax=true to calibrant fit" in page


def test_no_answer_stands_above_a_finding_that_contradicts_it():
    data = drawn(1500)
    wrong = (data["logits"].argmax(-1) == 2) & (np.arange(1500) % 5 == 0)
    data["labels"] = np.where(wrong, 4, data["labels"])
    for made in (report(data, methods=[]), report(drawn(1500, seed=3), methods=[])):
        severe = {f.severity for f in made.findings if f.code in MISCALIBRATED} & {"warn", "bad"}
        assert (made.verdict.answer in ("Yes", "Too few examples to tell")) == (not severe)
        assert not (severe and "CAL015" in {f.code for f in made.findings})


def test_a_warning_takes_back_that_there_is_no_evidence(calibrated):
    (subject,) = calibrated.subjects
    off = replace(subject.sure, accuracy=0.5, low=0.45, high=0.55, p_value=1e-9)
    found = _findings_of(replace(subject, sure=off))
    assert [finding.code for finding in found] == ["CAL003"]
    verdict = _verdict_of(subject, found)
    assert verdict.answer == "No"
    assert found[0].evidence in verdict.sentence
    assert "That alone would be within noise" in verdict.sentence
    lower = subject.answers.accuracy - 0.02
    average = replace(
        subject.answers, accuracy=lower, low=lower - 0.01, high=lower + 0.01, p_value=1e-3
    )
    found = _findings_of(replace(subject, answers=average, sure=off))
    assert [finding.code for finding in found] == ["CAL003", "CAL001"]
    assert "worse in places: " in _verdict_of(subject, found).sentence


def test_a_gain_that_may_be_none_does_not_help(over_confident):
    (subject,) = over_confident.subjects
    unsure = replace(
        subject, remedy=replace(subject.remedy, gain=LossReduction(0.02, -0.01, 0.05, 4321))
    )
    found = {finding.code: finding for finding in _findings_of(unsure)}
    assert "CAL014" not in found
    assert "slightly better, which may be noise" in found["CAL019"].evidence
    assert "Label about 2,900 more examples" in found["CAL019"].fix
    harm = replace(
        unsure, remedy=replace(subject.remedy, gain=LossReduction(-0.2, -0.3, -0.1, None))
    )
    found = {finding.code: finding for finding in _findings_of(harm)}
    assert "makes the confidences worse" in found["CAL019"].evidence


def test_data_that_look_wrong_are_neither_trusted_nor_calibrated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logits = 2 * np.random.default_rng(0).normal(size=(200, 3))
    np.savez("right.npz", logits=logits, labels=logits.argmax(1))
    made = report("right.npz", methods=["none", "ts"], level=None)
    codes = {finding.code for finding in made.findings}
    assert "CAL010" in codes
    assert not {"CAL014", "CAL015", "CAL019"} & codes
    assert [each.code for each in made.findings if each.fix] == ["CAL010"]
    page = made.to_markdown()
    assert "**What fixes it:** Check the data first." in page
    assert not re.search("as below|Use ts|Ask a person|multicalibration", page + made.to_html())
    assert "calibrant report right.npz" in page
    assert not re.search("calibrant (fit|apply|export)|Calibrate, and", page)


def test_shifted_labels_advise_nothing_else():
    data = drawn(300, classes=3, factor=2.0)
    labels = np.roll(data["labels"], 1)
    made = report({**data, "labels": labels, "site": np.arange(300) % 2}, methods=["none", "ts"])
    assert [each.code for each in made.findings if each.fix] == ["CAL010"]
    assert "CAL018" not in {each.code for each in made.findings}
    assert "more than that explains" not in made.to_html() + made.to_markdown()


def test_remedies_agree_with_the_table_and_the_examples_at_hand(tmp_path):
    data = drawn(300, classes=3, factor=4.0)
    path = tmp_path / "rows.csv"
    table = np.c_[data["logits"], data["labels"]]
    np.savetxt(path, table, delimiter=",", header="logit_0,logit_1,logit_2,label", comments="")
    fixes = {f.code: f.fix for f in report(path, methods=["none", "ts"]).findings}
    assert fixes["CAL004"].startswith("Calibrate with ts, as below")
    assert "Label more examples of each of the classes" in fixes["CAL005"]
    assert "column split" in fixes["CAL013"]
    probs = {"probs": scipy.special.softmax(data["logits"], -1), "labels": data["labels"]}
    assert (
        "val_probs"
        in {f.code: f.fix for f in report(probs, methods=["none", "ts"]).findings}["CAL013"]
    )
    many = {f.code: f.fix for f in report(drawn(3000, classes=3, factor=4.0), methods=[]).findings}
    assert "svs, sms" in many["CAL005"]


def test_too_few_examples_name_how_many_a_yes_needs():
    said = [report(drawn(150, seed=s), methods=[]) for s in range(9)]
    few = [each for each in said if each.verdict.answer == "Too few examples to tell"]
    assert len(few) >= 7
    counts = [re.findall(r"A yes needs about ([\d,]+)\.", each.verdict.sentence) for each in few]
    needed = int(np.median([int(count.replace(",", "")) for (count,) in counts]))
    answers = [report(drawn(needed, seed=s), methods=[]).verdict.answer for s in range(10, 20)]
    assert answers.count("Too few examples to tell") <= 2
    assert answers.count("Yes") >= 5
    (fix,) = [finding.fix for finding in few[0].findings if finding.code == "CAL007"]
    assert re.search(r"Label about [\d,]+ more examples", fix)


def test_subgroups_too_small_to_tell_are_not_called_calibrated():
    data = drawn(200, factor=2.5)
    made = report({**data, "colour": np.arange(200) % 6}, methods=[])
    assert made.verdict.answer in ("No", "Not quite")
    assert "No subgroup is shown to be miscalibrated" not in made.to_html() + made.to_markdown()


def test_a_later_set_is_compared_with_the_first():
    sets = {"monday": drawn(2000), "tuesday": drawn(2000, factor=3.0, seed=1)}
    found = {(f.subject, f.code): f for f in report(sets, methods=[]).findings}
    assert "of monday" in found["tuesday", "CAL016"].evidence
    assert ("monday", "CAL016") not in found


def test_ranges_far_off_forbid_a_yes_though_the_average_is_fine():
    rng = np.random.default_rng(0)
    p = np.concatenate([np.full(30_000, 0.001), np.full(300, 0.9)])
    labels = (rng.random(p.size) < np.where(p > 0.5, 0.6, p)).astype(int)
    result = report({"probs": p, "labels": labels}, methods=[])
    assert result.subjects[0].evaluation["ece"].value < 0.01
    assert result.verdict.answer == "Not quite"
    assert "86.7 to 93.3 %" in result.verdict.sentence


def test_the_verdict_follows_the_interval_where_the_test_sees_nothing(over_confident):
    (subject,) = over_confident.subjects
    evaluation = subject.evaluation
    assert evaluation["ece"].low > 0.05
    unsure = replace(evaluation, test=evaluation.test._replace(p_value=0.05))
    doubted = replace(subject, evaluation=unsure)
    found = _findings_of(doubted)
    assert "CAL015" not in {f.code for f in found}
    assert _verdict_of(doubted, found).answer == "No"


def test_a_no_needs_the_interval_and_the_test():
    """Of calibrated models of few examples, none is called clearly wrong by its interval alone."""
    for seed in (12, 54):  # two of sixty: the interval begins above 5 points, and p is 0.6 and 0.1
        rng = np.random.default_rng(seed)
        logits = 2 * rng.normal(size=150)
        labels = (logits + rng.logistic(size=150) > 0).astype(int)
        made = report(logits, labels, methods=[])
        evaluation = made.subjects[0].evaluation
        assert evaluation.test is not None
        assert evaluation.test.p_value > 0.05
        assert made.verdict.answer != "No"
