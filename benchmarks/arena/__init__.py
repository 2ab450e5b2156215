"""The arena: calibrators and their peers on many tasks, results as rows, and views of them."""
