"""Choices of a request are checked before anything is done with them."""

import pytest

from calibrant.ui.choices import Choices


def test_what_is_left_out_has_its_default():
    assert Choices.from_json({}) == Choices("auto", None, None, "auto", None)
    chosen = {"method": "ts", "fit_split": "", "test_split": "test", "keep_argmax": False}
    assert Choices.from_json({**chosen, "estimand": "top_label"}).fit_split == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "JSON object"),
        ("auto", "JSON object"),
        ({"path": "/etc/passwd"}, "JSON object with some of method"),
        ({"method": 3}, "method must be a name"),
        ({"method": None}, "method must be a name"),
        ({"fit_split": ["val"]}, "names or null"),
        ({"test_split": {}}, "names or null"),
        ({"estimand": "x"}, "estimand must be one of auto"),
        ({"estimand": []}, "estimand must be one of auto"),
        ({"keep_argmax": "yes"}, "true, false or null"),
        ({"keep_argmax": 1}, "true, false or null"),
    ],
)
def test_anything_else_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        Choices.from_json(content)
