"""Train by the papers' recipes and tabulate what comes out."""
