"""The prose of the project: phrases that readers stumbled over do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.html")),
]
BETTER = {
    "say how sure they are, and mean it": "measure and fix confidence",
    "stand for yours": "replace these names with your files",
    "# stands for yours": "# yours",
    "would rarely look this far off": "miscalibrated (p <= 0.001)",
    "weights by the held-out likelihood": "weighted by held-out likelihood",
    "as good within the noise of the best": "not significantly worse than the best",
    "the fit has seen these examples": "measured on fitting data",
    "leave everything open": "the error could be anywhere from 0 to 6.1 %",
    "mistakes that its confidences imply": "expected mistakes",
    "claimed less happened": "gap = confidence - accuracy",
    "than one that did not": "a right answer scores above a wrong one",
    "alone is that of class 1 of two": "one column `prob` means P(class 1)",
    "of the draws behind the intervals": "random seed for intervals",
    "as large as the example is hard": "adaptive",
    "names of sets stand in front": "prefix arrays with the split",
    "nearer to none the fewer": "shrinks toward",
    "logarithms of confidence and doubt": "beta calibration",
    "0 leaves out": "0 excludes",
    "0 leaves one out": "0 excludes",
    "0 leaves it out": "0 excludes",
    "within the noise of the best": "not significantly worse than the best",
    "% claimed, {": "mean confidence 90.3 %, accuracy 74.0 %",
    "suit the paper of": "follow your matplotlib style",
    "names as people type them": "case-insensitive names and aliases",
    "claimed on average": "mean confidence",
    "and who is told": "progress",
    "no power of theirs is left": "name the limit",
    "is no text": "wanted text",
    "statuses below 500 of problems": "retryable statuses",
    "halves of characters": "lone surrogates",
    "keeps its promise": "keeps its guarantee",
    "the promise": "the guarantee",
    "a promise": "a guarantee",
    "is promised": "is guaranteed",
    "are promised": "are guaranteed",
}
CHAIN = re.compile(r"\bof((?: (?:the|a|an|its|their|all|each|this|some))? [a-z]+ of){2} ")


def prose(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_plain_words(path):
    text = prose(path)
    lowered = text.lower()
    assert {old: new for old, new in BETTER.items() if old in lowered} == {}
    chains = [text[max(match.start() - 40, 0) : match.end()] for match in CHAIN.finditer(text)]
    assert chains == [], "write one of these with a verb, an adjective or a compound noun"


def test_the_check_sees_what_it_is_for():
    assert CHAIN.search("the mean of the widths of all bins of one model")
    assert not CHAIN.search("the mean width of the bins of one model")
