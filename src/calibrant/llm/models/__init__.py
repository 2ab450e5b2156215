"""Models: loading their weights, and services that run them."""
