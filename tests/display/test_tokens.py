import pytest

from calibrant.display.tokens import LISTED, shaded_tokens, token_table
from tests.support.markup import check_inert, parsed


def test_the_text_is_whole_and_every_token_has_its_number():
    tokens = ["The", " <b>", "\n", "ok"]
    reader = check_inert(shaded_tokens(tokens, [0.95, 0.4, 1.0, float("nan")]))
    assert "".join(reader.text).replace("↵", "") == "".join(tokens)
    assert [v for k, v in reader.attributes if k == "title"] == ["95.0 %", "40.0 %", "100.0 %"]


def test_less_probable_tokens_are_shaded_more_and_doubtful_ones_underlined():
    spans = shaded_tokens(["a", "b", "c", "d"], [1.0, 0.5, 0.49, 0.0])
    reader = parsed(spans)
    assert [v for k, v in reader.attributes if k == "style"] == [
        *("--c:0%", "--c:32%", "--c:33%", "--c:65%")
    ]
    kinds = [v for k, v in reader.attributes if k == "class" and v.startswith("cal-t")][1:]
    assert kinds == ["cal-t", "cal-t", "cal-t cal-doubt", "cal-t cal-doubt"]


def test_the_table_of_a_long_text_is_bounded():
    reader = parsed(token_table(["x"] * (LISTED + 7), [0.5] * (LISTED + 7)))
    assert len(reader.tables[0]) == LISTED + 1
    assert "and 7 more" in reader.text


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        shaded_tokens(["a"], [0.1, 0.2])
