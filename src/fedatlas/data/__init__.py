"""Data at a site: reading, checking, caching, sampling."""
