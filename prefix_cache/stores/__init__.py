"""The stores behind ``prefix_cache.store.open_store``."""
