"""HTTP service `efcil serve`: predictions and incremental updates of a model. Needs the extra `serve`."""
