"""Graded answers whose chances to be right are known."""

from calibrant.llm.answers.rows import AnswerRows


def graded_answers(rng, n, *, sharp=2.0, **about):
    """Answers with a confidence c, of which a share of c**sharp is right."""
    confidence = rng.beta(5, 1, n)
    correct = rng.random(n) < confidence**sharp
    pairs = zip(confidence.tolist(), correct.tolist(), strict=True)
    return AnswerRows.of([{"confidence": c, "correct": right, **about} for c, right in pairs])


def joined(*several):
    """Answers of several sets, in one."""
    return AnswerRows.of([row for answers in several for row in answers.rows])


def true_error(limit, sharp=2.0):
    """Share of wrong ones among answers of at least a confidence, whose density is 5 c**4."""
    return 1 - 5 / (5 + sharp) * (1 - limit ** (5 + sharp)) / (1 - limit**5)
