"""What results look like: text, boxes of notebooks, figures and reports.

Results are data, and know nothing of this package. Each kind of result has its box and its figure
in the module that is called like the package of its class, and that is imported on first use.
"""

from calibrant.show.box import box as box, draw as draw
from calibrant.show.tokens import shaded_text as shaded_text
