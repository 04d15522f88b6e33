"""The service `efcil serve`: answers over HTTP, and a model that is taught while it answers. Needs the extra `serve`."""
