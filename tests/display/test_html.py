from calibrant.display.html import escaped


def test_markup_and_control_characters_are_inert():
    assert escaped('<img src="x">') == "&lt;img src=&quot;x&quot;&gt;"
    assert escaped("\x1b[31m'\u202e") == r"\x1b[31m&#x27;\u202e"
    assert escaped(3) == "3"
