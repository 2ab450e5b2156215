"""Sentences, and the tokens of parts of a text."""

import pytest

from calibrant.llm.claims.spans import sentences, token_spans, tokens_within


@pytest.mark.parametrize(
    "parts",
    [
        ["One.", "Two!", "Three?"],
        ["Dr. J. Ruiz pays $3.50, e.g. in Lima.", 'He said "no."', "Fine..."],
        ["Facts:", "1. Lima is big.", "2. Cusco is high"],
        ["\u79d8\u9b6f\u3002", "\u30ea\u30de\uff01"],
        ["no end"],
    ],
)
def test_sentences_are_these(parts):
    text = "  " + "\n ".join(parts) + " \n\n"
    assert [text[a:b] for a, b in sentences(text)] == parts


@pytest.mark.parametrize("text", ["", "  \n "])
def test_empty_texts_have_no_sentences(text):
    assert sentences(text) == []


def test_tokens_of_a_part_are_those_with_a_visible_character_in_it():
    tokens = [" The", " sea", ".", " ", "", "\u6d77", "\u3002Or", "\n"]
    text = "".join(tokens)
    places = token_spans(tokens)
    assert [text[a:b] for a, b in places] == ["The", "sea", ".", "", "", "\u6d77", "\u3002Or", ""]
    first, second = (1, 9), (10, 12)
    assert text[slice(*first)] == "The sea."
    assert tokens_within(places, first).tolist() == [0, 1, 2]
    # the parts of a character belong to it, and a token across the end to both sides
    assert tokens_within(places, second).tolist() == [3, 4, 5, 6]
    assert tokens_within(places, (12, 14)).tolist() == [6]
    assert tokens_within(places, (4, 5)).tolist() == []
    assert tokens_within(token_spans(["", " "]), (0, 1)).tolist() == []
