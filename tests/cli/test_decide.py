"""The verb decide."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrant import artifacts
from calibrant.decide import DecisionRule
from calibrant.workflows.decide import decide
from tests.support.json_page import check_output
from tests.support.prediction_files import arrays_in

pytestmark = pytest.mark.usefixtures("folder")


def test_a_threshold_is_explained_saved_and_applied(run):
    code, out, err = run("decide", "p.npz", "--max-error", "0.5", "--save", "rule")
    assert code == 0
    expected: Any = decide("p.npz", max_error=0.5)
    fitted, checked = expected.fitted, expected.checked
    assert f"at least {expected.rule.guarantee.threshold:.4f}." in out
    assert "With 95 % certainty, at most 50 % of the accepted answers are wrong." in out
    assert "fitted on 564 examples of 5 classes" in out
    share = f"{checked.size:,} ({100 * checked.size / checked.n:.1f} %)"
    row = (
        f"checked on: test split {checked.n:,} {share} {100 * checked.wrong / checked.judged:.2f} %"
    )
    assert row in " ".join(out.split())
    assert f"{fitted.size:,} ({100 * fitted.size / fitted.n:.1f} %)" in out
    assert f"The labels of {checked.judged} examples agree with the guarantee." in out
    assert err == "wrote rule\n"
    assert artifacts.load("rule", DecisionRule).guarantee == expected.rule.guarantee

    unlabelled = np.load("plain.npz")["logits"]
    np.savez("new.npz", logits=unlabelled, id=np.arange(len(unlabelled)))
    code, out, err = run("decide", "new.npz", "--rule", "rule", "-o", "decisions.npz")
    assert code == 0
    assert "unnamed split" in out
    assert "agree with" not in out
    assert err == "wrote decisions.npz\n"
    written = arrays_in("decisions.npz")
    made = expected.rule.decide(unlabelled)
    assert set(written) == {"id", *made}
    assert np.array_equal(written["accepted"], made["accepted"])


def test_sets_of_a_calibrated_model_in_json(run):
    assert run("fit", "p.npz", "--method", "ts", "-o", "ts")[0] == 0
    arguments = ("decide", "p.npz", "--coverage", "0.8", "--calibrator", "ts")
    code, out, _ = run(*arguments, "--save", "rule", "-o", "sets.csv", "--json")
    assert code == 0
    found = json.loads(out)
    expected = decide("p.npz", coverage=0.8, calibrator=artifacts.load("ts"))
    assert found["rule"] == {"kind": "sets", **expected.rule.guarantee.state()}
    assert found["checked_on"]["coverage"] == 1 - expected.checked.wrong / expected.checked.n
    assert found["checked_on"]["mean_size"] == expected.checked.size / expected.checked.n
    assert found["fitted_on"]["examples"] == "a random half of the test split, seed 0"
    assert found["p_value"] == expected.rule.p_value(expected.checked)
    assert (found["saved"], found["decisions"]) == ("rule", "sets.csv")
    with open("sets.csv") as file:
        assert len(file.readlines()) == 1 + 600 + 500

    code, out, _ = run("decide", "p.npz", "--rule", "rule", "--json")
    assert code == 0
    assert json.loads(out)["splits"]["test"]["n"] == 500
    code, out, _ = run("decide", "p.npz", "--rule", "rule")
    assert "The calibrator must not have seen the examples of the fit." in " ".join(out.split())


@pytest.mark.filterwarnings("always:no threshold keeps", "always:.* cannot show a coverage")
@pytest.mark.parametrize("promise", [("--max-error", "1e-5"), ("--coverage", "0.9999")])
def test_a_promise_that_the_data_do_not_allow_exits_2(run, promise):
    """As every failure but an exceeded limit does; what there is to see is printed."""
    code, out, err = run("decide", "p.npz", *promise, "--save", "rule", "-o", "out.csv")
    assert code == 2
    assert "warning: " in err
    assert err.endswith("nothing is written\n")
    assert ("No answer is accepted" in out) == (promise[0] == "--max-error")
    assert ("Every set holds all classes" in out) == (promise[0] == "--coverage")
    assert not Path("rule").exists()
    assert not Path("out.csv").exists()
    code, out, _ = run("decide", "p.npz", *promise, "--save", "rule", "--json")
    assert code == 2
    assert json.loads(out)["saved"] is None


@pytest.mark.filterwarnings("ignore:no threshold keeps")
def test_a_saved_rule_that_decides_nothing_is_refused(run):
    rule = decide("p.npz", max_error=1e-5).rule
    assert rule.decides_nothing
    artifacts.save(rule, "rule")
    code, out, err = run("decide", "p.npz", "--rule", "rule", "-o", "out.csv")
    assert (code, out) == (2, "")
    assert "error: rule: No answer is accepted: an error of at most 0.001 %" in err
    assert not decide("p.npz", max_error=0.5).rule.decides_nothing
    assert not decide("p.npz", coverage=0.5).rule.decides_nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one of --max-error, --coverage, --rule"),
        (("--max-error", "0.1", "--coverage", "0.9"), "name one of"),
        (("--rule", "rule", "--fit-split", "val"), "leave out --calibrator, --save"),
        (("--rule", "nowhere"), "there is no artifact nowhere"),
        (("--max-error", "5"), "max_error must be between 0 and 1, got 5"),
    ],
)
def test_what_cannot_run_says_why(run, arguments, message):
    code, out, err = run("decide", "p.npz", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_thresholds_by_group_are_found_and_checked(run):
    arguments = ("decide", "p.npz", "--max-error", "0.6", "--by", "site", "--certainty", "0.8")
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    check_output([*arguments], out)
    found = json.loads(out)
    arrays = dict(np.load("p.npz"))
    assert set(found["groups"]) == set(arrays["test_site"].astype(str))
    for name, group in found["groups"].items():
        parts: Any = {
            f"{split}_{key}": arrays[f"{split}_{key}"][arrays[f"{split}_site"].astype(str) == name]
            for split in ("val", "test")
            for key in ("logits", "labels")
        }
        certainty = 1 - 0.2 / len(found["groups"])
        alone = decide(parts, max_error=0.6, certainty=certainty)
        assert group == {**alone.to_dict(), "promise": group["promise"]}
        assert "With 93.3333 % certainty" in group["promise"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert "With 80 % certainty, at most 60 % of the accepted answers are wrong, in every" in out
    assert "The labels of all groups agree with the guarantee." in out


def test_costs_alone_choose_the_cheapest_threshold(run):
    arguments = ("decide", "p.npz", "--cost", "0,1,5,0", "--positive", "2")
    code, out, _ = run(*arguments, "--save", "rule")
    assert code == 0
    cost: Any = [[0, 1], [5, 0]]
    expected: Any = decide("p.npz", cost=cost, positive=2)
    least = expected.rule.guarantee.threshold
    assert f"Flag an example as 2 if the probability of this class is at least {least:.4f}." in out
    assert "certainty" not in out
    assert f"{expected.rule.figures(expected.checked)['cost']:.4g}" in out
    assert artifacts.load("rule", DecisionRule).guarantee.state() == expected.rule.guarantee.state()
    for more in ((), ("--by", "site")):
        code, out, _ = run(*arguments, *more, "--json")
        assert code == 0
        check_output([*arguments, *more], out)
    assert run(*arguments, "--by", "site")[0] == 0


def test_groups_that_are_beside_the_guarantee_are_named(run):
    arrays = dict(np.load("p.npz"))
    off = arrays["test_site"] == arrays["test_site"][0]
    arrays["test_labels"][off] = (arrays["test_logits"].argmax(1)[off] + 1) % 5
    np.savez("off.npz", **arrays)
    code, out, _ = run("decide", "off.npz", "--max-error", "0.6", "--by", "site")
    assert code == 0
    assert f"{arrays['test_site'][0]}: The labels of" in out
    assert out.count("contradict") == 1


@pytest.mark.filterwarnings("always:no threshold for")
def test_a_group_that_only_the_check_has_is_told(run):
    arrays = dict(np.load("p.npz"))
    sites = arrays["test_site"].astype("U9")
    sites[:7] = "elsewhere"
    np.savez("more.npz", **(arrays | {"test_site": sites}))
    code, out, err = run("decide", "more.npz", "--max-error", "0.6", "--by", "site")
    assert (code, "elsewhere" in out) == (0, False)
    assert "no threshold for elsewhere: no examples to fit it on (val split)" in err


@pytest.mark.filterwarnings("ignore:no threshold")
def test_a_group_with_too_few_examples_is_told(run):
    code, out, err = run("decide", "p.npz", "--max-error", "0.001", "--by", "site")
    assert code == 2
    assert "No answer is accepted: an error of at most 0.1 % is not shown" in out
    assert "agree" not in out
    for rest in (("--save", "rule"), ("-o", "out.csv")):
        code, _, err = run("decide", "p.npz", "--max-error", "0.5", "--by", "site", *rest)
        assert code == 2
        assert "leave out --coverage, --rule, --save and -o" in err
    assert run("decide", "p.npz", "--coverage", "0.5", "--by", "site")[0] == 2


def test_sets_by_class_hold_for_each_class_and_thresholds_have_none(run):
    code, out, _ = run("decide", "p.npz", "--coverage", "0.8", "--by-class")
    assert code == 0
    assert "for each class. This holds" in out.replace("\n", " ")
    assert "not for each subgroup." in out.replace("\n", " ")
    for rest in ((), ("--by", "site")):
        code, _, err = run("decide", "p.npz", "--max-error", "0.5", "--by-class", *rest)
        assert (code, "--by-class is for --coverage" in err) == (2, True)


def test_misses_are_limited(run):
    arrays = dict(np.load("p.npz"))
    two: Any = {f"{s}_logits": arrays[f"{s}_logits"][:, 0] for s in ("val", "test")}
    two |= {f"{s}_labels": (arrays[f"{s}_labels"] == 0).astype(int) for s in ("val", "test")}
    np.savez("two.npz", **two)
    found = json.loads(run("decide", "two.npz", "--recall", "0.8", "--json")[1])
    misses = decide("two.npz", max_fnr=0.2).to_dict()
    assert misses["rule"]["limits"][0]["name"] == "fnr"
    assert misses["rule"]["threshold"] == found["rule"]["threshold"]
    assert misses["checked_on"]["fnr"] == pytest.approx(1 - found["checked_on"]["recall"])
