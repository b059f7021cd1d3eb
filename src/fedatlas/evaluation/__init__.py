"""How good a model is, where labels are missing: metrics, scoring at a site, averages, statistics."""
