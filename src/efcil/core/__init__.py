"""The closed forms of the paper and the statistics they work on: pure, float64."""
