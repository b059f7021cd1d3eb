"""The engine on NVIDIA FLARE; imported only where it is chosen."""
