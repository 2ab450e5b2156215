"""Figures of calibration, from the data of results.

Results have ``plot(ax=None)``, which calls these functions. Every function draws into ``ax`` (a new
figure without one) and returns it; those of several diagrams make and return a figure. Colours
follow your matplotlib style, light or dark; :func:`look` sets them and the size.
Needs matplotlib: ``pip install 'calibrant[plot]'``.
"""

from calibrant.show.figures.comparison import (
    forest_plot as forest_plot,
    forest_plots as forest_plots,
)
from calibrant.show.figures.learned import (
    adjustment_plot as adjustment_plot,
    gate_plot as gate_plot,
    keep_plot as keep_plot,
    map_plot as map_plot,
    temperature_plot as temperature_plot,
)
from calibrant.show.figures.look import look as look, save_figure as save_figure
from calibrant.show.figures.reliability import (
    before_and_after as before_and_after,
    class_diagrams as class_diagrams,
    confidence_histogram as confidence_histogram,
    confidence_histograms as confidence_histograms,
    margin_diagrams as margin_diagrams,
    reliability_diagram as reliability_diagram,
    reliability_diagrams as reliability_diagrams,
    smooth_diagram as smooth_diagram,
    smooth_diagrams as smooth_diagrams,
)
from calibrant.show.figures.selective import (
    decision_curve_plot as decision_curve_plot,
    risk_coverage_plot as risk_coverage_plot,
    set_size_plot as set_size_plot,
    threshold_plot as threshold_plot,
)
from calibrant.show.figures.windows import (
    drift_plot as drift_plot,
    estimate_plot as estimate_plot,
    window_plot as window_plot,
)
