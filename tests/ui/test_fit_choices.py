"""Choices of a request are checked before anything is done with them."""

import pytest

from calibrant.ui.fit_choices import Choices


def test_what_is_left_out_has_its_default():
    assert Choices.from_json({}) == Choices("auto", None, None, "auto", "auto")
    chosen = {"method": "ts", "fit_split": "", "test_split": "test", "keep_argmax": False}
    assert Choices.from_json({**chosen, "estimand": "top_label"}).fit_split == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "JSON object"),
        ("auto", "JSON object"),
        ({"path": "/etc/passwd"}, "a request has no option 'path': its options are method"),
        ({"method": 3}, "method must be text, got 3"),
        ({"method": None}, "method must be text, got None"),
        ({"fit_split": ["val"]}, "fit_split must be text, or None"),
        ({"test_split": {}}, "test_split must be text, or None"),
        ({"estimand": "x"}, "estimand must be one of auto"),
        ({"estimand": []}, "estimand must be one of auto"),
        ({"keep_argmax": "yes"}, "keep_argmax must be True or False, or one of auto, got 'yes'"),
        ({"keep_argmax": 1}, "keep_argmax must be True or False, or one of auto, got 1"),
    ],
)
def test_anything_else_is_refused(content, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        Choices.from_json(content)
