"""Examples that a stream has seen: each counts once, however often it is delivered.

With ids, two examples are the same if their ids are. Without, their scores tell; but scores may
also be equal by chance, as those of a model that has few different outputs. Two tests decide.

The first compares a delivery with each window as a whole. The two share examples if they hold the
same scores equally often, or if too many scores are in both. For this test, look at the scores that
occur twice in the two together. If these, with a and b examples, were drawn independently, such a
score would be in both with a probability of 2 a b / (a + b)^2, and the number of those in both is
binomial. After a drift that probability may be larger, up to 1/2, but no more than that for equal
sizes.

The second is for examples of many windows, a few of each, such as the labels that came in a night.
It compares the delivery with all windows together, and takes examples whose score is once in the
delivery and once in a window for the same, if few such scores are expected by chance: the scores
that occur twice within the delivery or within a window tell how many. So this is for models whose
scores are nearly all different.

An example that is left out although it was new costs power, but no false alarms: the decision does
not depend on its outcome.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from calibrant._core.checks import IGNORED, BoolArray, IntArray, check_choice
from calibrant.monitor.deliveries import SPREAD, Keys, _KeyedExamples, _View

REPORTED_SHARE = 0.1
"""Share of examples with the scores of others from which a report says so."""
FALSE_LINK = 0.01
"""Probability with which a new delivery is taken for one that shares examples with a window."""
CHANCE_SHARE = 0.1
"""Largest share expected by chance, of the scores that the second test takes for the same."""
LEAST_SHARED = 7
"""Smallest number of such scores: single examples would be left out by chance, one by one."""

COMPARED = (("exact", "exact"), ("half", "single"), ("single", "half"))
"""Views of a delivery and of a window that are compared."""


class _Late(NamedTuple):
    """Labels that have come for examples of a window, which were waiting for them.

    Attributes
    ----------
    window : int
    examples, places : (n,)
        Places in the delivery and in the window.
    """

    window: int
    examples: IntArray
    places: IntArray


class _Known(NamedTuple):
    """Examples of a delivery, by what is known of them.

    Attributes
    ----------
    new : (n,)
        True for examples that were never seen.
    late : list of _Late
        Labels of examples that were waiting for them.
    again : int
        Number of labels that have counted already.
    """

    new: BoolArray
    late: list[_Late]
    again: int

    @property
    def nothing(self) -> bool:
        """True if a delivery has examples, but nothing that counts."""
        return bool(self.new.size and not self.new.any() and not self.late)


class _SeenExamples:
    """The examples of the last windows: of as many as have ``limit`` examples, or of one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.windows: dict[int, _KeyedExamples] = {}

    def __len__(self) -> int:
        return sum(map(len, self.windows.values()))

    @property
    def by(self) -> str:
        """What the examples are recognised by; empty while there are none."""
        return next((seen.by for seen in self.windows.values()), "")

    @property
    def alike(self) -> int:
        """Number of examples with a score that others have, if they are many."""
        keys = np.concatenate(
            [np.zeros(0, np.uint64), *(x.exact.keys for x in self.windows.values())]
        )
        counts = np.unique(keys, return_counts=True)[1]
        alike = int(counts[counts > 1].sum())
        return alike if alike > REPORTED_SHARE * len(self) else 0

    def recognise(self, came: _KeyedExamples) -> _Known:
        """Find the examples of a delivery that were seen before, and change nothing."""
        new, again = np.ones(len(came), np.bool_), 0
        late: list[_Late] = []
        if not (came.by and len(came)):
            return _Known(new, late, again)
        self.check_comparable(came.by)
        if came.by == "ids" and (copies := np.flatnonzero(_occurrences(came.keys))).size:
            raise ValueError(
                f"ids must differ within a delivery, but example {copies[0]} has that of an "
                "earlier one: number the examples"
            )
        for overlap, values in self._same(came):
            seen = self.windows[overlap.window]
            mine, theirs = overlap.mine, overlap.theirs
            left = new[mine.places] & np.isin(mine.keys, values)
            right = np.isin(theirs.keys, values)
            examples, places = mine.places[left], theirs.places[right]
            labels = came.labels[examples], seen.labels[places]
            i, j = _matched(mine.keys[left], labels[0], theirs.keys[right], labels[1])
            examples, places = examples[i], places[j]
            new[examples] = False
            labelled, counted = came.labelled[examples], seen.labelled[places]
            again += int(np.sum(labelled & counted))
            if (joins := labelled & ~counted).any():
                late.append(_Late(overlap.window, examples[joins], places[joins]))
        return _Known(new, late, again)

    def _same(self, came: _KeyedExamples) -> Iterator[tuple[_WindowOverlap, Keys]]:
        """Yield overlaps with the values that are those of the same examples."""
        comparisons = [
            _WindowComparison(
                getattr(came, mine), {k: getattr(x, theirs) for k, x in self.windows.items()}
            )
            for mine, theirs in COMPARED[: 1 if came.by == "ids" else None]
            if len(getattr(came, mine))
        ]
        doubt = 1.0 if came.by == "ids" else FALSE_LINK / max(1, len(self.windows))
        linked = {each.window for c in comparisons for each in c.overlaps if each.is_link(doubt)}
        for comparison in comparisons:
            for overlap in comparison.overlaps:
                if overlap.window in linked:
                    yield overlap, overlap.values
        for comparison in comparisons:
            if came.by != "ids" and comparison.has_few_by_chance():
                for overlap in comparison.overlaps:
                    yield overlap, overlap.values[overlap.once]

    def check_comparable(self, by: str) -> None:
        """Raise if the examples so far are recognised by something else."""
        if self.by not in ("", by):
            remedy = "pass ids (--ids COLUMN) with every delivery"
            if self.by != "ids":
                remedy = f"pass {self.by} again, or begin a new stream with ids"
            raise ValueError(
                f"this stream recognises its examples by their {self.by}, got {by}: {remedy}"
            )

    def settle(self, late: _Late, labels: IntArray) -> None:
        """Note labels that have come for examples of a window."""
        self.windows[late.window].labels[late.places] = labels

    def add(self, number: int, new: _KeyedExamples) -> None:
        """Add new examples to a window, and forget the oldest windows beyond the limit."""
        if not (new.by and len(new)):
            return
        seen = self.windows.get(number)
        self.windows[number] = new if seen is None else _KeyedExamples.joined([seen, new])
        while len(self.windows) > 1 and len(self) > self.limit:
            del self.windows[next(iter(self.windows))]

    def merge(self, other: _SeenExamples, known: list[_Known]) -> None:
        """Add the examples of another worker, by what was recognised of each of its windows."""
        for (number, examples), each in zip(other.windows.items(), known, strict=True):
            for late in each.late:
                self.settle(late, examples.labels[late.examples])
            self.add(number, examples.take(each.new))

    def state(self) -> dict[str, Any]:
        """Return everything for JSON: 12 bytes for each example, in base 64."""
        windows = [
            [number, _text(seen.keys, "<u8"), _text(seen.labels, "<i4")]
            for number, seen in self.windows.items()
        ]
        return {"by": self.by, "windows": windows}

    def restore(self, state: dict[str, Any]) -> None:
        """Add the examples that :meth:`state` describes."""
        check_choice("by", state["by"], ("", "ids", "logits", "probs"))
        for number, *texts in state["windows"]:
            keys, labels = map(_values, texts, ("<u8", "<i4"))
            valid = ((labels >= 0) | (labels == IGNORED)).all() and len(keys) == len(labels)
            if type(number) is not int or not (valid and state["by"]):
                raise ValueError(f"the examples of window {number!r:.60} are damaged")
            self.add(number, _KeyedExamples(state["by"], keys.astype(np.uint64), labels))


class _WindowOverlap:
    """Scores that a delivery and a window have in common.

    Attributes
    ----------
    window : int
    mine, theirs : _View
        Of the delivery and of the window.
    values : (m,)
        Keys that are in both.
    once : (m,)
        True for those that are once in each.
    """

    def __init__(self, window: int, mine: _View, theirs: _View) -> None:
        self.window, self.mine, self.theirs = window, mine, theirs
        here, there = _common(mine.values, theirs.values)
        self.values = mine.values[here]
        self._counts = mine.counts[here], theirs.counts[there]
        self.once = np.asarray((self._counts[0] == 1) & (self._counts[1] == 1))

    def __len__(self) -> int:
        return len(self.values)

    def is_link(self, doubt: float) -> bool:
        """Return True if the two share examples, by the first test of this module."""
        one, other, (mine, theirs) = self.mine, self.theirs, self._counts
        if len(one.values) == len(other.values) == len(self) and (mine == theirs).all():
            return len(one) > 1 or doubt == 1
        shared = np.count_nonzero(self.once)
        within = one.twice + other.twice - np.sum(mine == 2) - np.sum(theirs == 2)
        by_chance = 2 * len(one) * len(other) / (len(one) + len(other)) ** 2
        return bool(shared and bdtrc(shared - 1, shared + within, by_chance) <= doubt)


class _WindowComparison:
    """A delivery and all windows, in one precision; windows without an overlap are left out."""

    def __init__(self, mine: _View, theirs: dict[int, _View]) -> None:
        self.mine, self.theirs = mine, theirs
        overlaps = (_WindowOverlap(number, mine, view) for number, view in theirs.items())
        self.overlaps = [overlap for overlap in overlaps if len(overlap)]

    def has_few_by_chance(self) -> bool:
        """Return True if a score that is once in each is of one example, by the second test.

        Of the pairs of different examples with rare scores, those of the delivery with a window
        and those within the two are equal equally often.
        """
        shared = sum(np.count_nonzero(overlap.once) for overlap in self.overlaps)
        within = self.mine.twice + sum(view.twice for view in self.theirs.values())
        pairs = 2 * self.mine.rare * sum(view.rare for view in self.theirs.values())
        pairs_within = self.mine.rare**2 + sum(view.rare**2 for view in self.theirs.values())
        by_chance = (within + 1) * pairs / max(1, pairs_within)
        return bool(shared >= LEAST_SHARED and by_chance <= CHANCE_SHARE * shared)


def _common(one: Keys, other: Keys) -> tuple[IntArray, IntArray]:
    """Return the places of equal values in two lists of different values in order."""
    if len(one) > len(other):
        there, here = _common(other, one)
        return here, there
    at = np.searchsorted(other, one)
    at[at == len(other)] = 0
    here = np.flatnonzero(other[at] == one)
    return here, at[here]


def _matched(
    keys: Keys, labels: IntArray, others: Keys, other_labels: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the places of the same examples in two lists.

    Of several with one key, those with one label are matched first.
    """
    i, j = _paired(_mixed(keys, labels), _mixed(others, other_labels))
    k, m = np.setdiff1d(np.arange(len(keys)), i), np.setdiff1d(np.arange(len(others)), j)
    more, other_more = _paired(keys[k], others[m])
    return np.concatenate([i, k[more]]), np.concatenate([j, m[other_more]])


def _paired(keys: Keys, others: Keys) -> tuple[IntArray, IntArray]:
    """Return the places of equal keys: the first with the first, the second with the second."""
    mine, theirs = (_mixed(values, _occurrences(values)) for values in (keys, others))
    _, here, there = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    return here, there


def _mixed(keys: Keys, numbers: IntArray) -> Keys:
    """Return keys of pairs of a key and a number."""
    return np.asarray((keys * SPREAD + numbers.view(np.uint64)) * SPREAD)


def _occurrences(keys: Keys) -> IntArray:
    """Number the occurrences of each key, from 0."""
    order = np.argsort(keys, kind="stable")
    _, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    numbers = np.empty(keys.size, np.int64)
    numbers[order] = np.arange(keys.size) - np.repeat(first, counts)
    return numbers


def _text(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def _values(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)
