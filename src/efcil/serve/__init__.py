"""The service `efcil serve`: answers over HTTP from a model that is taught meanwhile. Needs the extra `serve`."""
