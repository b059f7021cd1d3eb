"""Figures of papers, a package for each paper. `compare.parts` loads them by name when a page asks for them."""
