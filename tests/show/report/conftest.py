import numpy as np
import pytest

from calibrant.show.report import report
from tests.support.few_draws import few_draws


@pytest.fixture(scope="package", autouse=True)
def quick_intervals():
    with few_draws():
        yield


def drawn(n=3000, classes=5, factor=1.0, seed=0):
    """Logits that are ``factor`` times those that the labels are drawn from."""
    rng = np.random.default_rng(seed)
    honest = 1.5 * rng.normal(size=(n, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return {"logits": factor * honest, "labels": labels}


@pytest.fixture(scope="package")
def over_confident():
    """A report on logits that are three times too large, with a validation split and subgroups."""
    val, test = drawn(1000, factor=3.0, seed=1), drawn(1500, factor=3.0)
    arrays = {
        f"{name}_{key}": v for name, s in (("val", val), ("test", test)) for key, v in s.items()
    }
    arrays["class_names"] = np.array(["ant", "bee", "cat", "dog", "<i>eel</i>"])
    arrays["val_place"], arrays["test_place"] = np.arange(1000) % 2, np.arange(1500) % 2
    return report(arrays, by="place", methods=["none", "ts"])


@pytest.fixture(scope="package")
def calibrated():
    return report(drawn(), methods=[])
