"""What going cold costs a model: its own predictions with cold pages in the cache, beside those without."""
