"""Temperature heads: fitting them from token tables, and attaching them to models."""
