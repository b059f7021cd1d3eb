"""The engine on Flower; imported only where it is chosen."""
