"""A trained model in the forms in which others use it: `fedatlas export`."""
