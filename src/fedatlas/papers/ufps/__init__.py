"""Figures of UFPS that show options which this method alone has."""
