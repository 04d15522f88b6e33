"""Made-up summaries of runs."""


def summary(method="dpcr", A_f=50.0, A_avg=60.0, *, order="1993", seconds=100.0, done=10, **more):
    return {
        **{"method": method, "preset": "paper", "dataset": "cifar100", "tasks": 10, "task_sizes": [10] * 10},
        **{"order": order, "seed": 0, "A_f": A_f, "A_avg": A_avg, "A_t": [A_f] * done, "tasks_done": done},
        **{"seconds": seconds, "device": "GPU", "precision": "bf16", "threads": None, "world_size": 1},
        **{"concurrent_runs": 1, "commit": "abc123", "options": {"ridge": 200.0}},
        **{"command": f"efcil run {method} cifar100 --order {order}", "training": {"first": {"epochs": 200}}},
        **more,
    }
