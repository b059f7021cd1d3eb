"""Training at a site and prediction with a net: the local loop, augmentation, inference. Knows no method."""
