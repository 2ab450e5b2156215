"""The controller of the keep rate."""

import pytest

from calibrant.retrain.keep_rate import KeepRate


def test_keep_rate_falls_when_confidence_exceeds_its_target_and_rises_otherwise():
    def after(confidence, accuracy, gamma=1.0):
        return KeepRate(0.5, 0.5, gamma, 0.1).update(confidence, accuracy)

    assert after(0.95, 0.90) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.85, 0.90) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=0.9) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=1.0) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.90, 0.90) == 0.5


def test_keep_rate_stays_within_bounds_and_moves_by_a_tenth_at_most():
    controller = KeepRate(0.35, 100.0, 1.0, 0.2)
    rates = [controller.update(0.9, 0.5) for _ in range(3)]
    assert rates == pytest.approx([0.25, 0.2, 0.2])
    rates = [controller.update(0.5, 0.9) for _ in range(12)]
    assert rates[0] == pytest.approx(0.3)
    assert rates[-1] == 1.0


def test_step_is_halved_at_each_change_of_sign_down_to_a_sixteenth():
    controller = KeepRate(0.5, 0.8, 1.0, 0.1)
    steps = []
    for confidence in (0.91, 0.92, 0.89, 0.91, 0.89, 0.91, 0.89, 0.91):
        controller.update(confidence, 0.9)
        steps.append(controller.step)
    assert steps == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.1, 0.05, 0.05, 0.05])


def test_controller_converges_to_the_rate_at_which_confidence_is_right():
    """If confidence is 0.6 + 0.5 q and accuracy 0.8, q must become 0.4."""
    controller = KeepRate(0.9, 4.0, 1.0, 0.1)
    for _ in range(40):
        controller.update(0.6 + 0.5 * controller.keep, 0.8)
    assert controller.keep == pytest.approx(0.4, abs=1e-3)
