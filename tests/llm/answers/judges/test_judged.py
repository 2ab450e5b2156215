"""Files of judged answers: what is read, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from calibrant.llm import read_judged


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "judged.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return write


def test_all_keys_are_read(write):
    judged = read_judged(
        write(
            {
                "judge": 7,
                "human": "yes",
                "label_probability": 0.5,
                "stratum": "x",
                "answer": "Lima",
            },
            {"judge": "3", "human": None, "system": "b", "question": "q", "answer": ""},
            {"judge": 10, "human": 0.25, "label_probability": "0.1", "system": "a"},
        ),
        scale=(1, 10),
    )
    np.testing.assert_array_equal(judged.judge, [7, 3, 10])
    np.testing.assert_array_equal(judged.human, [1, np.nan, 0.25])
    np.testing.assert_allclose(judged.shares, [6 / 9, 2 / 9, 1])
    np.testing.assert_array_equal(judged.probability, [0.5, np.nan, 0.1])
    texts: Any = judged  # none of the optional columns is None
    assert texts.strata.tolist() == ["x", "", ""]
    assert texts.systems.tolist() == ["", "b", "a"]
    assert texts.lengths.tolist() == [4, 1, 1]
    assert len(set(texts.questions.tolist())) == 3  # rows without one stand for themselves
    assert judged.source.confidence == "judge, 1 to 10"
    assert judged.part(judged.known).judge.tolist() == [7, 10]


def test_votes_in_words_need_no_scale(write):
    judged = read_judged(write({"judge": "right", "human": 1}, {"judge": False}))
    assert judged.judge.tolist() == [1, 0]
    assert judged.scale == (0, 1)
    assert judged.strata is judged.questions is judged.systems is judged.probability is None


@pytest.mark.parametrize(
    ("row", "scale", "message"),
    [
        ({"judge": 7}, None, "judge of line 1 .* from 0 to 1, got 7: state another scale, as 1,10"),
        ({"judge": 11}, (1, 10), "from 1 to 10, got 11: correct the scale or the score"),
        ({"judge": "yes"}, (1, 10), "from 1 to 10, got 'yes'"),
        ({"judge": True}, (1, 10), "from 1 to 10, got True"),
        ({"judge": float("nan")}, None, "from 0 to 1, got nan"),
        ({"judge": 1, "human": 2}, None, "human of line 1 .* a grade from 0 to 1, got 2"),
        ({"judge": 1, "human": "maybe"}, None, "got 'maybe'"),
        ({"human": 1}, None, "line 1 .* has no judge"),
        ({"judge": 1, "human": 1, "label_probability": 0}, None, "label_probability of line 1"),
        ({"judge": 1, "length": 0}, None, "length of line 1 .* must be a number above 0"),
        ({"judge": 1}, (3, 3), "scale must be the lowest and the highest score, got 3,3"),
    ],
)
def test_bad_rows_are_refused(write, row, scale, message):
    with pytest.raises(ValueError, match=message):
        read_judged(write(row), scale=scale)


def test_several_judges_are_refused(write):
    with pytest.raises(ValueError, match="the source of the confidence differs"):
        read_judged(write({"judge": 1, "source": "one"}, {"judge": 1, "source": "two"}))
