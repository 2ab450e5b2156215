"""Tables of results: frames hold what the results hold, and LaTeX prints what the screen shows."""

import re
import sys

import numpy as np
import pytest

import calibrant
from calibrant.monitor import Monitor
from calibrant.show.metrics import _metrics_table, _subgroup_table
from calibrant.show.tables import Table, _latex_escaped
from calibrant.show.workflows import _methods_table
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn

ODD = r"a_b & 50 % \ $x^2$ ~ {#1} <b> [c] | 'd' \"e\" "


@pytest.fixture(scope="module")
def evaluation():
    logits, labels = drawn(np.random.default_rng(0), 400, 3)
    groups = np.array([ODD, "plain", "\x1b[31mred\n&"])[np.arange(400) % 3]
    return calibrant.evaluate(2 * logits, labels, metrics=["accuracy", "ece", "nll"], by=groups)


@pytest.fixture(scope="module")
def comparison():
    logits, labels = drawn(np.random.default_rng(1), 400, 3)
    kinds = {"none": "none", "my_ts & co": "ts", "two": "quadratic"}  # which fails: three classes
    methods = {name: EVERY_METHOD[kind]() for name, kind in kinds.items()}
    return calibrant.compare({"logits": 2 * logits, "labels": labels}, methods=methods)


def printed(text):
    """What LaTeX prints of escaped text: a small reader of its commands, one after another."""
    names = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"}
    names |= {"textless": "<", "textgreater": ">", "textbar": "|", "textquotedbl": '"'}
    shown = []
    while text:
        if match := re.match(r"\\([a-z]+)\{\}", text):
            shown.append(names[match[1]])
        elif match := re.match(r"\\([&%$#_{}])", text):
            shown.append(match[1])
        elif match := re.match(r"\{\[\}", text):
            shown.append("[")
        else:
            match = re.match(r"[^\\{}&%$#_^~<>|\"\[]", text)
            assert match is not None, f"LaTeX would act on {text!r}"
            shown.append(match[0])
        text = text[match.end() :]
    return "".join(shown)


def cells_of(latex):
    """Cells of each row between the rules, and the number of columns that were declared."""
    lines = latex.splitlines()
    declared = re.fullmatch(r"\\begin\{tabular\}\{(l?r*)\}", lines[0])
    assert declared is not None
    assert lines[1] == r"\toprule"
    assert lines[3] == r"\midrule"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    rows = [re.split(r"(?<!\\)&", line.removesuffix(r"\\")) for line in [lines[2], *lines[4:-2]]]
    assert {len(row) for row in rows} == {len(declared[1])}
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize("text", [ODD, "plain", "%", "\\\\", "\x1b[0m", "ümlaut", ""])
def test_escaped_text_prints_as_it_is(text):
    expected = " ".join(text.replace("\x1b", "\\x1b").split())
    assert printed(_latex_escaped(text)) == expected


def test_the_best_figures_are_bold_and_names_keep_their_stars():
    rows = cells_of(Table(["", "a"], [["*x", "*0.5"], ["y", "-"], ["z", ""]]).latex())
    assert rows == [["", "a"], ["*x", r"\textbf{0.5}"], ["y", "--"], ["z", ""]]


def test_latex_shows_what_the_screen_shows(evaluation, comparison):
    (part, *_) = evaluation.by.values()
    whole, subgroups = evaluation.to_latex().split("\n\n")
    for latex, table in (
        (part.to_latex(), _metrics_table(part)),
        (whole, _metrics_table(evaluation)),
        (subgroups, _subgroup_table(evaluation)),
        (comparison.to_latex(), _methods_table(comparison)),
    ):
        rows = [table.headings, *table.rows]
        for cells, expected in zip(cells_of(latex), rows, strict=True):
            plain = [re.sub(r"^\\textbf\{(.*)\}$", r"\1", cell) for cell in cells]
            for cell, text in zip(plain, expected, strict=True):
                text = " ".join(text.replace("\x1b", "\\x1b").split())
                assert cell == "--" if text == "-" else printed(cell) == text.lstrip("*")
            assert [cell != bare for cell, bare in zip(cells, plain, strict=True)] == [
                cell.startswith("*") for cell in expected
            ]


def test_a_frame_of_an_evaluation_has_its_estimates(evaluation):
    pytest.importorskip("pandas")
    frame = evaluation.to_frame()
    assert list(frame) == ["subgroup", "metric", "n", "value", "low", "high"]
    assert len(frame) == (1 + len(evaluation.by)) * len(evaluation)
    for name, part in [(None, evaluation), *evaluation.by.items()]:
        own = frame[frame.subgroup.isna() if name is None else frame.subgroup == name]
        assert own.metric.tolist() == list(part)
        assert set(own.n) == {part.n}
        expected = np.array([tuple(part[metric]) for metric in part])
        np.testing.assert_array_equal(own[["value", "low", "high"]], expected)
    assert list(part.to_frame()) == ["metric", "n", "value", "low", "high"]


def test_a_frame_of_a_comparison_has_a_row_for_each_method(comparison):
    pytest.importorskip("pandas")
    frame = comparison.to_frame().set_index("method")
    assert list(frame.index) == ["none", "my_ts & co", "two"]
    for method, evaluation in comparison.measured.items():
        for metric, estimate in evaluation.items():
            found = frame.loc[method, [metric, f"{metric}_low", f"{metric}_high"]]
            np.testing.assert_array_equal(found.to_numpy(float), estimate)
    assert frame.ece.isna().tolist() == [False, False, True]
    assert frame.error.isna().tolist() == [True, True, False]
    assert frame.argmax_changed["none"] == 0


def test_a_frame_of_a_monitor_has_its_windows(rng):
    pytest.importorskip("pandas")
    report = Monitor(window=100).update(*drawn(rng, 250, 3)).report()
    frame = report.to_frame()
    assert frame.n.tolist() == [100, 100, 50]
    assert frame.e_value.iloc[-1] == report.e_value
    assert [row[1] for row in cells_of(report.to_latex())] == ["examples", "100", "100", "50"]


def test_without_pandas_the_remedy_is_named(evaluation, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas; to_dict\(\) has the same"):
        evaluation.to_frame()
    assert evaluation.to_latex()
