"""Charts of pages and notebooks as SVG from templates: without a script or another file.

Every chart is one ``<svg>`` element for a page of HTML that declares the colours of
:mod:`calibrant.show.style` as CSS variables. Marks show their numbers while the pointer is over
them. Undefined values (NaN) are left out.
"""

from calibrant.show.charts.curves import (
    Line as Line,
    histogram_chart as histogram_chart,
    line_chart as line_chart,
    reliability_chart as reliability_chart,
)
from calibrant.show.charts.intervals import (
    EstimatedWindow as EstimatedWindow,
    bar_chart as bar_chart,
    drift_chart as drift_chart,
    estimate_chart as estimate_chart,
    forest_chart as forest_chart,
)
