"""A fuzzer: random and hostile inputs, each determined by a target and a seed.

``make fuzz`` runs it for hours; a few inputs of every target are part of ``make test``.
"""
