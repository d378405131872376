"""Scaling studies: points, efficiency, rules, projections."""
