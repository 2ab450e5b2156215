"""Claims: parts of long answers, each with a confidence of its own."""
