"""The only place that calls backward(): machine, schedule, one step, one loop, checkpoints."""
