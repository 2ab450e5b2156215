"""Results as HTML and SVG, from plain values: used by notebooks, the report and the page."""
