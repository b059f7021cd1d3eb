"""Generated images with known truth, for tests and experiments: organs, an abdomen, chest radiographs, noise."""
