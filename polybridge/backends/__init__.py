"""The built-in backends, one folder a framework; only the registry imports them."""
