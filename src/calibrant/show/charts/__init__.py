"""Charts of pages and notebooks as SVG from templates: without a script or another file.

Every chart is one ``<svg>`` element for a page of HTML that declares the colours of
:mod:`calibrant.show.palette` as CSS variables. Marks show their numbers while the pointer is over
them. Undefined values (NaN) are left out.
"""

from calibrant.show.charts.bins import (
    histogram_chart as histogram_chart,
    reliability_chart as reliability_chart,
)
from calibrant.show.charts.lines import Line as Line, line_chart as line_chart
from calibrant.show.charts.rows import bar_chart as bar_chart, forest_chart as forest_chart
from calibrant.show.charts.windows import (
    EstimatedWindow as EstimatedWindow,
    drift_chart as drift_chart,
    estimate_chart as estimate_chart,
)
