"""What is done to a model on its way: compression, differential privacy, secure aggregation."""
