import pytest

import calibrant as cal
from calibrant.integrations.tensorboard import interval_charts, log_calibration
from tests.support.evaluations import FEW, check_scalars, predictions

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_values_figure_and_charts_are_in_the_file_of_events(rng, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    logits, labels = predictions(rng)
    result = cal.evaluate(logits, labels, metrics=FEW)
    with SummaryWriter(str(tmp_path)) as writer:
        log_calibration(writer, result, step=3)
        writer.add_custom_scalars(interval_charts(result))
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    series = {name: events.Scalars(name) for name in tags["scalars"]}
    assert {event.step for values in series.values() for event in values} == {3}
    logged = {name: values[0].value for name, values in series.items()}
    # TensorBoard has float32
    check_scalars(logged, logits, labels, tolerance=1e-6, metrics=FEW)
    (image,) = events.Images("calibration/reliability")
    assert image.width > 200
    charts = interval_charts(result)["calibration"]
    assert [*charts] == [*FEW]
    assert all({*lines} <= {*logged} for _, lines in charts.values())
