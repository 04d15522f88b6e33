"""Closed-form solutions of the paper and the class statistics they use: pure functions in float64."""
