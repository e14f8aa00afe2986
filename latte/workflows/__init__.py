"""Whole experiments, from a recipe to a report: each loads, trains, evaluates and writes pages with the rooms above."""
