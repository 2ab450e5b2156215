"""Charts of pages and notebooks as text of SVG: they need no library, no script and no file.

Every chart is one ``<svg>`` element for a page of HTML that declares the colours of
:mod:`calibrant.show.palette` as CSS variables. Marks show their numbers while the pointer is over
them. Undefined values (NaN) are left out.
"""

from calibrant.show.charts.bins import (
    histogram_chart as histogram_chart,
    reliability_chart as reliability_chart,
)
from calibrant.show.charts.estimates import (
    EstimatedWindow as EstimatedWindow,
    estimate_chart as estimate_chart,
)
from calibrant.show.charts.lines import (
    Line as Line,
    drift_chart as drift_chart,
    line_chart as line_chart,
)
from calibrant.show.charts.rows import bar_chart as bar_chart, forest_chart as forest_chart
