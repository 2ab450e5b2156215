"""Training of image networks by the recipes of the papers."""
