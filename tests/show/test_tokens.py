import pytest

from calibrant.show.style import DARK, LIGHT
from calibrant.show.tokens import LISTED, STRONGEST, _shaded, shaded_text
from tests.show.test_palette import contrast
from tests.support.markup import check_inert, parsed


def test_the_text_is_whole_and_every_token_has_its_number():
    tokens = ["The", " <b>", "\n", "ok"]
    reader = check_inert(_shaded(tokens, [0.95, 0.4, 1.0, float("nan")]))
    assert "".join(reader.text).replace("↵", "") == "".join(tokens)
    assert [v for k, v in reader.attributes if k == "title"] == ["95.0 %", "40.0 %", "100.0 %"]


def test_less_probable_tokens_are_shaded_more_and_doubtful_ones_underlined():
    spans = _shaded(["a", "b", "c", "d"], [1.0, 0.5, 0.49, 0.0])
    reader = parsed(spans)
    assert [v for k, v in reader.attributes if k == "style"] == [
        *("--c:0%", "--c:28%", "--c:28%", "--c:55%")
    ]
    kinds = [v for k, v in reader.attributes if k == "class" and v.startswith("cal-t")][1:]
    assert kinds == ["cal-t", "cal-t", "cal-t cal-doubt", "cal-t cal-doubt"]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_text_can_be_read_on_the_strongest_shade(palette):
    shades = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (palette.wrong, palette.paper)]
    mixed = [(STRONGEST * a + (100 - STRONGEST) * b) // 100 for a, b in zip(*shades, strict=True)]
    assert contrast(palette.ink, "#" + "".join(f"{c:02x}" for c in mixed)) >= 4.5


def test_the_table_of_a_long_text_is_bounded():
    reader = parsed(shaded_text(["x"] * (LISTED + 7), [0.5] * (LISTED + 7))._repr_html_())
    assert len(reader.tables[0]) == LISTED + 1
    assert "and 7 more" in reader.text


def test_a_written_page_is_whole_and_has_the_text(tmp_path):
    shaded_text(["<b>", " x"], [0.25, 1], title="Why <i>?", note="n").write(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8")
    reader = check_inert(page)
    assert page.startswith("<!doctype html>")
    assert reader.text.count("Why <i>?") == 2  # in the head and above the text
    assert [v for k, v in reader.attributes if k == "title"][:2] == ["25.0 %", "100.0 %"]
    assert reader.tables[0][1:] == [["<b>", "25.0 %"], [" x", "100.0 %"]]


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([0.5], "one value for each of 2 tokens"),
        ([-0.1, 0.5], r"np\.exp of them"),
        ([0.1, 1.5], "got 1.5"),
    ],
)
def test_wrong_probabilities_are_refused(probs, message):
    with pytest.raises(ValueError, match=message):
        shaded_text(["a", "b"], probs)
