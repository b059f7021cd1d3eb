"""FedAtlas: one model that knows every class, from sites that each labelled only some."""

__version__ = "0.2.0"
