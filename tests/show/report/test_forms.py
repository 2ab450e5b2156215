"""Page, Markdown and JSON say the same, whatever the data hold."""

import html
import json
import re
import warnings
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
import scipy
import torch
from pyarrow import feather

import calibrant as cal
from calibrant.metrics.intervals import Estimate
from calibrant.show.pages import check_target
from calibrant.show.report.verdict import _limit, _snippets, _verdict_of
from calibrant.show.report.view import _view_of
from calibrant.show.tables import Table
from tests.show.report.conftest import drawn

HOSTILE = [
    "<script>alert(1)</script>",
    "a|b `c` *d* [e](http://outside.invalid) @f\n# g",
    "\x1b[31mred\u202e",
    "</style><img src=x onerror=alert(1)>",
    "\U0001f600 \u00e9\u0301 " + "very" * 100,
]
VOID = {"meta", "link", "input", "br", "img"}


class Tags(HTMLParser):
    """Every tag must be closed by its like."""

    def __init__(self):
        super().__init__()
        self.open, self.names, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.ids += [value for key, value in attributes if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(set(tags.ids)) == len(tags.ids)
    return tags


@pytest.fixture(scope="module")
def hostile():
    data = {**drawn(120), "class_names": np.array(HOSTILE)}
    data["place"] = np.array(HOSTILE)[data["labels"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cal.report(data, by="place", methods=["none"], level=None, title=HOSTILE[0])


def test_markup_in_names_stays_text(hostile):
    page = hostile.to_html()
    tags = parsed(page)
    assert tags.names.count("script") == 2  # the slider's numbers, and the script of the page
    assert "img" not in tags.names
    assert html.escape(HOSTILE[0]) in page
    assert "\x1b" not in page + hostile.to_markdown()
    assert "\u202e" not in page + hostile.to_markdown()


def test_markdown_cannot_be_broken_out_of(hostile):
    text = hostile.to_markdown()
    assert "<script" not in text
    assert "://outside" not in text
    assert "@f" not in text
    assert r"\[e\](http&#58;//outside.invalid) &#64;f \# g" in text
    assert "\n# g" not in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    assert len(tables) >= 5
    for table in tables:
        rows = [re.split(r"(?<!\\)\|", line) for line in table.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}
    assert text.count("<details>") == text.count("</details>")


def test_json_has_no_undefined_numbers(hostile):
    def refuse(name):
        raise AssertionError(name)

    text = hostile.to_json()
    stored = json.loads(text, parse_constant=refuse)
    assert stored["format"] == 1
    assert [c["name"] for c in stored["subjects"][0]["classes"]] == HOSTILE


def test_a_page_fetches_nothing_and_says_so_to_the_browser(over_confident):
    page = over_confident.to_html()
    assert not re.search(r"""(?:src|href|url|@import)\s*[=(]\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[\w./]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_the_page_shows_the_figures_of_evaluate_to_the_last_digit(over_confident):
    (subject,) = over_confident.subjects
    page, markdown = over_confident.to_html(), over_confident.to_markdown()
    stored = json.loads(over_confident.to_json())["subjects"][0]["evaluation"]["metrics"]
    for name, title in (("accuracy", "accuracy"), ("ece", "ECE"), ("auroc", "AUROC of confidence")):
        value, low, high = (100 * stored[name][key] for key in ("value", "low", "high"))
        cells = f"{value:.2f} %", f"[{low:.2f}, {high:.2f}]"
        assert f"{title}</th>" + "".join(f'<td class="cal-n">{c}</td>' for c in cells) in page
        assert f"| {title} | {value:.2f} % | \\[{low:.2f}, {high:.2f}\\] |" in markdown
    assert f"{stored['nll']['value']:.4f}" in page
    assert over_confident.verdict.figure == f"{100 * subject.evaluation['ece'].value:.2f} %"


def test_headings_are_in_order(over_confident):
    for page in (
        over_confident.to_html(),
        cal.report({"a": drawn(40), "b": drawn(40)}, methods=[], level=None).to_html(),
    ):
        levels = [int(tag[1]) for tag in parsed(page).names if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("n", [1, 2, 30])
def test_few_examples_make_a_report(n):
    result = cal.report(drawn(n), methods=[])
    parsed(result.to_html())
    assert result.to_markdown()
    json.loads(result.to_json())


def test_data_of_one_label_make_a_report():
    data = drawn(60)
    result = cal.report({**data, "labels": np.zeros(60, int)}, methods=["none", "ts"], level=None)
    parsed(result.to_html())
    assert "CAL009" in {finding.code for finding in result.findings}


def test_a_single_column_is_explained():
    with pytest.raises(ValueError, match="at least two classes"):
        cal.report({"logits": np.zeros((5, 1)), "labels": np.zeros(5, int)})


def test_many_classes_keep_the_page_small_and_say_what_is_left_out():
    rng = np.random.default_rng(0)
    data = {"logits": 5 * rng.normal(size=(2000, 5000)), "labels": rng.integers(0, 5000, 2000)}
    result = cal.report(data, methods=[], level=None)
    page = result.to_html()
    assert len(page) < 1_000_000
    assert "1,000 of 5,000: the JSON form has all" in page
    assert page.count('<tr><th scope="row">class ') == 1000
    assert len(json.loads(result.to_json())["subjects"][0]["classes"]) == 5000


def test_tags_weights_and_two_classes_make_pages():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(80, 3))
    tags = {"logits": logits, "labels": (rng.random((80, 3)) < 0.5).astype(int)}
    assert (
        "By tag"
        in cal.report(tags, estimand="multilabel", methods=["none", "pooled"], level=None).to_html()
    )
    two = {"logits": logits[:, 0], "labels": tags["labels"][:, 0], "w": rng.random(80)}
    page = cal.report(two, sample_weight="w", methods=["none", "ts"], level=None).to_html()
    assert "frequency of y = 1" in page
    assert "these count examples, and do not know weights" in page
    assert "With a guarantee" not in page


def test_thresholds_close_to_one_have_the_digits_that_matter():
    data = drawn(800, factor=12.0)
    probs = torch.as_tensor(data["logits"]).softmax(-1).amax(-1).numpy()
    subject = cal.report(data, methods=[], level=None).subjects[0]
    view = _view_of(subject, _verdict_of(subject, []), [])
    for share, threshold, _ in view.decisions.rows:
        assert 100 * (probs >= float(threshold)).mean() == pytest.approx(float(share[:-2]), abs=0.3)
    assert sum(float(p.threshold) > 0.99995 for p in subject.coverage) > 40


def test_the_guarantee_names_its_calibrator(over_confident):
    words = "with 95 % certainty, for the confidences of ts as fitted on the val split"
    assert words in over_confident.to_html()
    assert words in over_confident.to_markdown()


def test_one_split_has_no_guarantee_but_says_where_to_get_one():
    page = cal.report(drawn(800, factor=3.0), methods=["none", "ts"], level=None).to_html()
    assert "With a guarantee" not in page
    assert "calibrant decide, which sets half of the examples aside" in page


def test_two_classes_are_called_by_their_names():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=80)
    labels = (rng.random(80) < 0.5).astype(int)
    data = {"logits": logits, "labels": labels, "class_names": np.array(["stays", "leaves"])}
    made = cal.report(data, methods=[], level=None)
    for text in (made.to_html(), made.to_markdown()):
        assert "y = 1" not in text
        assert "P(leaves)" in text


def test_classes_of_few_examples_are_folded_away():
    data = drawn(300, classes=3)
    data["logits"][:, 2] -= 4
    made = cal.report(data, methods=[], level=None)
    page = made.to_html()
    few = [c.part.name for c in made.subjects[0].classes if c.part.n < 10]
    assert few == ["class 2"]
    table, _, folded = page.partition("1 with fewer than 10 examples, too few to tell")
    assert "class 0</th>" in table
    assert "class 2</th>" not in table
    assert "class 2</th>" in folded


def test_gaps_point_away_from_a_zero_in_the_middle():
    made = Table(("", "gap"), [("a", "+8.0"), ("b", "-2.0"), ("c", "-")], bars=1).__html__()
    assert re.findall(r'gap (\w+)" style="--g:(\d+)%', made) == [("over", "50"), ("under", "12")]


def test_costs_are_told_in_cases(over_confident):
    (subject,) = over_confident.subjects
    wrong = 1000 * (1 - subject.answers.accuracy)
    view = _view_of(subject, over_confident.verdict, over_confident.findings)
    as_it_is, calibrated, *asking = view.choices.rows
    assert as_it_is[1:4] == ("1000", "0", f"{wrong:.0f}")
    assert float(as_it_is[4]) == pytest.approx(1000 * (1 - subject.answers.confidence), abs=0.6)
    assert float(calibrated[4]) == pytest.approx(wrong, abs=40)
    answered, left = map(int, asking[0][1:3])
    assert answered == pytest.approx(900, abs=10)
    assert left == 1000 - answered
    assert int(asking[0][3]) < wrong


def test_few_examples_stand_beside_what_a_calibrated_model_would_show():
    made = cal.report(drawn(150), methods=["none", "ts", "auto"])
    assert re.search(r"By chance, a calibrated model shows about \d+ % on 150 ex", str(made))
    assert "By chance, a calibrated model" in made.to_html()
    assert "By chance" not in cal.report(drawn(400), methods=[]).to_html()


def test_the_advice_is_in_plain_words():
    made = cal.report(drawn(400, factor=3.0), methods=["none", "ts"])
    (finding,) = [each for each in made.findings if each.code == "CAL014"]
    assert not re.search(r"\bts\b|log loss", finding.evidence)
    assert re.search(r"The method chosen, ts, lowers the log loss by 0\.\d", finding.fix)
    assert "Calibrate it: correct the stated confidences" in made.to_html()


def test_a_calibrated_model_is_left_as_it_is():
    page = cal.report(drawn(), methods=["none", "ts"]).to_html()
    assert "Leave it as it is" in page
    assert "calibrant fit" not in page
    assert "ECE after calibration" not in page


def test_files_are_written_whole_by_their_suffix(tmp_path, calibrated):
    for suffix, start in ((".html", "<!doctype"), (".md", "# "), (".json", "{")):
        calibrated.save(tmp_path / f"report{suffix}")
        assert (tmp_path / f"report{suffix}").read_text("utf-8").startswith(start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    with pytest.raises(ValueError, match=r"\.html, \.md, \.json, got report\.pdf"):
        calibrated.save(tmp_path / "report.pdf")
    assert check_target("A.HTM") == ".html"


def test_reports_show_themselves(calibrated):
    assert repr(calibrated) == "Report(Calibration of predictions, Yes, 1 good)"
    assert str(calibrated) == calibrated.to_markdown()
    box = calibrated._repr_html_()
    assert "CAL015" in box
    assert "<script" not in box


def commands(made):
    """The copied commands of a report, by their title."""
    return {each.title: each.code for each in _snippets(made.subjects[0])}


def test_commands_name_splits_that_are_not_the_usual_ones():
    arrays = {f"noise_{name}": values for name, values in drawn(400, factor=3.0).items()}
    shown = commands(cal.report(arrays, methods=["none", "ts"], split="noise"))
    assert "--method ts --fit-split noise -o" in shown["Fit a calibrator, and apply it"]
    assert "\"ts\", split='noise')" in shown["The same in Python"]


def test_the_gate_of_a_release_measures_new_examples_and_stops_the_model_as_it_is(tmp_path):
    """At 150 rows the interval after calibration reaches the ECE before it."""
    data, path = drawn(150, classes=3, factor=2.5, seed=4), tmp_path / "rows.csv"
    table = np.c_[scipy.special.softmax(data["logits"], -1), data["labels"]]
    np.savetxt(path, table, delimiter=",", header="prob_0,prob_1,prob_2,label", comments="")
    made = cal.report(path, methods=["none", "ts"])
    remedy = made.subjects[0].remedy
    assert remedy is not None
    assert remedy.helps
    (gate,) = [code for title, code in commands(made).items() if title.startswith("Stop a")]
    assert "apply calibrator today.csv -o today_calibrated.csv" in gate
    assert "evaluate today_calibrated.csv" in gate
    assert "rows.csv" not in gate
    limit = float(gate.rpartition("=")[2])
    assert remedy.before is not None
    assert remedy.after is not None
    assert remedy.after["ece"].value < limit < remedy.before["ece"].value


def test_commands_for_a_table_write_tables_of_the_same_kind(tmp_path):
    """Arrow keeps the columns and types that no array file could."""
    data, path = drawn(150, classes=3, factor=2.5, seed=4), tmp_path / "rows.arrow"
    probs = scipy.special.softmax(data["logits"], -1)
    columns = {f"prob_{k}": probs[:, k] for k in range(3)}
    feather.write_feather(pyarrow.table({**columns, "label": data["labels"]}), path)
    made = cal.report(path, methods=["none", "ts"])
    assert any("-o calibrated.arrow" in code for code in commands(made).values())
    (advice,) = [finding.fix for finding in made.findings if finding.code == "CAL013"]
    assert advice.startswith("Add a column split")


def test_the_limit_of_a_release_is_the_end_of_the_interval_where_that_stops_the_model():
    assert _limit(Estimate(0.031, 0.01, 0.052), 0.2) == 0.06
    assert _limit(Estimate(0.031, 0.01, 0.052)) == 0.06
    assert _limit(Estimate(0.10, 0.01, 0.17), 0.16) == 0.13
    assert _limit(Estimate(0.002, 0.0, 0.005), 0.012) == 0.007


def test_margins_are_those_of_what_was_stored():
    data = drawn(200, classes=3)
    probs = {"probs": scipy.special.softmax(data["logits"], -1), "labels": data["labels"]}
    page = cal.report(probs, methods=[], level=None).to_html()
    assert "By margin of the two largest log-probabilities" in page
    assert "two largest logits" not in page + cal.report(probs, methods=[]).to_markdown()
    assert "By margin of the two largest logits" in cal.report(data, methods=[]).to_html()


def test_no_limit_of_a_release_allows_an_error_that_the_verdict_forbids(calibrated):
    """A limit at the error of a model that is off would let every copy of it pass."""
    off = cal.report(drawn(150, classes=2, factor=1.6, seed=4), methods=["none", "ts"])
    assert off.verdict.answer == "Not quite"
    assert "Stop a release" not in off.to_html() + off.to_markdown()
    assert "Stop a release" in calibrated.to_html()


def test_the_first_thing_to_do_is_said_without_commands(over_confident, calibrated):
    off = cal.report(drawn(150, classes=2, factor=1.6, seed=4), methods=["none", "ts"])
    few = cal.report(drawn(60), methods=[])
    assert few.verdict.answer == "Too few examples to tell"
    (more,) = re.findall(r"Ask your team to label about ([\d,]+) more examples, and", str(off))
    assert "**What fixes it:** Label more examples" in str(off)
    assert f"Label about {more} more examples" in str(off)
    (for_yes,) = re.findall(r"Label about ([\d,]+) more examples: so many would", str(few))
    for made, words in (
        (over_confident, "put a calibrator behind the model, as below, and to check it on new"),
        (calibrated, "leave the model as it is, and to check it on new"),
        (few, f"label about {for_yes} more examples, and to repeat this report"),
    ):
        assert f"<p>Ask your team to {words}" in made.to_html()
        assert f"Ask your team to {words}" in made.to_markdown()


def test_bars_of_mistakes_are_shares_of_all_answers(over_confident):
    (subject,) = over_confident.subjects
    view = _view_of(subject, over_confident.verdict, over_confident.findings)
    part = subject.answers
    widths = [float(width) for _, _, width, _ in view.meters]
    assert widths == pytest.approx(
        [100 - 100 * part.confidence, 100 - 100 * part.accuracy], abs=0.01
    )


def test_bars_of_wide_ranges_are_explained():
    words = "The bar of a range wider than 20 points is drawn around the mean of its examples."
    assert words in cal.report(drawn(60), methods=[], level=None).to_html()
    assert words not in cal.report(drawn(), methods=[], level=None).to_html()


def test_subgroups_are_sorted_as_their_tables_say(over_confident):
    page = over_confident.to_html()
    assert "By place, sorted by the lower end of the interval of the ECE" in page
    groups = over_confident.subjects[0].evaluation.by.values()
    ends = [group["ece"].low for group in groups]
    assert ends == sorted(ends, reverse=True)


def test_commands_name_no_usual_split(over_confident):
    assert not [code for code in commands(over_confident).values() if "split" in code]


def test_tags_are_not_sent_to_the_monitor():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 3))
    labels = (logits + rng.logistic(size=logits.shape) > 0).astype(int)
    tags = {"logits": 3 * logits, "labels": labels}
    made = cal.report(tags, methods=["none", "pooled"], estimand="multilabel")
    assert not [code for code in commands(made).values() if "monitor" in code]
