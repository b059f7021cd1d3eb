"""What everything rests on: labels, batches, tensors by name, options, seeds, errors, and the contract of a method."""
